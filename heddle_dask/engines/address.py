"""Where an engine listens: a Unix socket that only its owner's user can reach, or a loopback port."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from heddle_dask.core.errors import BadInput

LONGEST_SOCKET_PATH_BYTES = 107
"""Linux keeps the path of a Unix socket in 108 bytes, the last of which is zero (unix(7))."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """The address of one engine: exactly one of a socket and a port.

    Attributes
    ----------
    socket
        Path of its Unix socket.
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
    """The address of a socket in a directory.

    Raises
    ------
    BadInput
        The path is too long for a socket.
    """
    path = str(directory / name)
    length = len(os.fsencode(path))
    if length > LONGEST_SOCKET_PATH_BYTES:
        raise BadInput(
            f"socket {path} has a path of {length} bytes, and sockets take {LONGEST_SOCKET_PATH_BYTES}: "
            "use a directory with a shorter path"
        )
    return EngineAddress(socket=path)
