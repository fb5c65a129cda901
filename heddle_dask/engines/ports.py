"""Ports and network interfaces, for what speaks no Unix sockets: NIXL's side channel, and routers in benchmarks."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from heddle_dask.core.errors import BadInput

LOOPBACK = "127.0.0.1"


def free_port(host: str = LOOPBACK) -> int:
    """A port on which no process listens at this address of the machine now.

    Raises
    ------
    BadInput
        The machine has no such address.
    """
    family, address = _resolved(host)
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            raise _not_here(host) from None
        return int(probe.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach the address."""
    return ipaddress.ip_address(_resolved(host)[1].partition("%")[0]).is_loopback


def interface_of(host: str) -> str:
    """The network interface that has an address of this machine.

    Raises
    ------
    BadInput
        None has it.
    """
    _, address = _resolved(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name.partition(":")[0]  # an alias of an interface is called NAME:LABEL
    if is_loopback(host):  # 127.0.0.2 is an address of no interface, and reached all the same
        return interface_of(LOOPBACK)
    raise _not_here(host)


def _resolved(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BadInput(
            f"engine kv_host {host!r} is no address ({error.strerror}): use one of this machine"
        ) from None
    return family, str(address[0])


def _not_here(host: str) -> BadInput:
    return BadInput(
        f"engine kv_host {host!r} is no address of this machine: start the worker with --host or --interface"
    )
