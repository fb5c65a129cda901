"""Where an engine listens: a Unix socket that only its owner's user can reach, or a loopback port.

The directory of the sockets belongs to this user alone; ports are chosen here too, and the interface that has an
address.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import random
import socket
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from heddle_dask.core.errors import BadInput

LONGEST_SOCKET_PATH_BYTES = 107
"""Linux keeps the path of a Unix socket in 108 bytes, the last of which is zero (unix(7))."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of one engine: exactly one of a socket and a port.

    Attributes
    ----------
    port
        Its loopback port, for a router that speaks no Unix sockets. Every user of the machine reaches it.
    """

    socket: str = ""
    port: int = 0

    @property
    def url(self) -> str:
        """The base URL of requests. Over a Unix socket the host has no meaning: the connection is made by path."""
        return "http://engine" if self.socket else f"http://127.0.0.1:{self.port}"

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.url


def socket_address(directory: Path, name: str) -> EngineAddress:
    path = str(directory / name)
    length = len(os.fsencode(path))
    if length > LONGEST_SOCKET_PATH_BYTES:
        raise BadInput(
            f"socket {path} has a path of {length} bytes, and sockets take {LONGEST_SOCKET_PATH_BYTES}: "
            "use a directory with a shorter path"
        )
    return EngineAddress(socket=path)


# Room behind the directory's path for the name of a socket, also of one in an engine's own directory.
_NAME_BYTES = 60
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def engines_directory() -> Path:
    """The directory of this user's engines on this machine: their sockets, and the records of their processes.

    All owners of engines share it, so that each start finds what a dead owner has left behind. It lies in the directory
    for temporary files, or in ``/tmp`` where the path would be too long for a socket. ``XDG_RUNTIME_DIR`` would not do:
    systemd removes it at the user's last logout, also under programs that go on.
    """
    name = f"heddle-engines-{os.getuid()}"
    path = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(path)) + _NAME_BYTES > LONGEST_SOCKET_PATH_BYTES:
        path = Path("/tmp") / name
    return private_directory(path)


def private_directory(path: Path) -> Path:
    """Make a directory with mode 0700, or make sure that the one that is there is this user's alone.

    Raises
    ------
    BadInput
        It is a link or a file, belongs to another user, or others could have written into it; or it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        # Never through a link, which another user may have put there and may turn at any time.
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(
            f"directory {path} cannot be used: it must be a real directory of this user ({error.strerror}): "
            "remove it, or set TMPDIR to a directory of your own"
        ) from error
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            raise BadInput(f"directory {path} belongs to user {status.st_uid}: set TMPDIR to a directory of your own")
        if status.st_mode & _OTHERS_WRITE:
            raise BadInput(f"directory {path} may be written by other users: remove it and what is in it")
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return path


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
    """The network interface that has an address of this machine."""
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
        raise BadInput(f"engine kv_host {host!r} is no address ({error.strerror}): use one of this machine") from None
    return family, str(address[0])


def _not_here(host: str) -> BadInput:
    return BadInput(
        f"engine kv_host {host!r} is no address of this machine: start the worker with --host or --interface"
    )
