"""Whether a connection to a scheduler can be read, and used, by others on its network."""

from __future__ import annotations

import ipaddress
import warnings

from distributed.comm import parse_address, parse_host_port

_PLAIN = ("tcp", "ws", "ucx")


class UnencryptedConnection(UserWarning):
    """The connection to the scheduler leaves this machine without encryption."""


def unencrypted(address: str) -> str:
    """One line about an address that is neither on this machine nor encrypted; empty for others."""
    scheme, location = parse_address(address)
    if scheme not in _PLAIN:
        return ""
    host = parse_host_port(location, 0)[0]
    try:
        on_this_machine = ipaddress.ip_address(host).is_loopback
    except ValueError:
        on_this_machine = host in ("", "localhost")
    if on_this_machine:
        return ""
    return (
        f"the connection to {address} is not encrypted, and whoever reaches that address can run code on the cluster: "
        "use tls:// (docs/security.md)"
    )


def warn_if_unencrypted(address: str) -> None:
    """Issue the warning `UnencryptedConnection` about such an address."""
    line = unencrypted(address)
    if line:
        warnings.warn(UnencryptedConnection(line), stacklevel=2)
