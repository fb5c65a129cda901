"""Ports and network interfaces, for what speaks no Unix sockets: NIXL's side channel, and routers in benchmarks."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from heddle_dask.core.errors import BadInput

LOOPBACK = "127.0.0.1"
# Environment variable of a worker: FIRST:LAST, the ports on which processes of its job may listen for other machines.
PORTS_VARIABLE = "HEDDLE_PORTS"
# Below are ports of well-known services.
_LOWEST_PORT = 20_000
_PORTS_TRIED = 64


def port_range(environ: Mapping[str, str]) -> range | None:
    """The ports that the site lets through, as the cluster file has told this worker; None: any."""
    first, _, last = environ.get(PORTS_VARIABLE, "").partition(":")
    return range(int(first), int(last) + 1) if first.isdigit() and last.isdigit() else None


def free_port(host: str = LOOPBACK, among: range | None = None) -> int:
    """A port on which no process listens at this address of the machine now.

    An engine binds it seconds later, so it lies below the ports that the kernel gives to connections: one of those is
    often taken meanwhile.

    Parameters
    ----------
    among
        The only ports that may be taken; None: any.

    Raises
    ------
    BadInput
        The machine has no such address, or none of the ports is free.
    """
    family, address = _resolved(host)
    below = among or range(_LOWEST_PORT, max(_first_of_connections(), _LOWEST_PORT + 1))
    # Drawn by the system: two engines that start together must not try the same ones.
    drawn = random.SystemRandom().sample(below, len(below) if among else min(_PORTS_TRIED, len(below)))
    for port in drawn if among else (*drawn, 0):
        with socket.socket(family) as probe:
            try:
                probe.bind((address, port))
            except OSError as error:
                if port and error.errno == errno.EADDRINUSE:
                    continue
                raise _not_here(host) from None
            return int(probe.getsockname()[1])
    raise BadInput(f"none of the ports {below[0]}:{below[-1]} is free on this node: widen worker-ports")


def _first_of_connections() -> int:
    """The first port that the kernel gives to connections."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _LOWEST_PORT  # unknown: the kernel chooses


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
