"""Loopback ports for engines."""

from __future__ import annotations

import socket

from heddle_dask.core.errors import BadInput


def free_port() -> int:
    """A loopback port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Refuse a port on which an engine cannot listen.

    Raises
    ------
    BadInput
        It is out of range, in use, or not allowed.
    """
    if not 1 <= port <= 65535:
        raise BadInput(f"port {port} is out of range: use 1 to 65535")
    with socket.socket() as probe:
        # As servers do: a port with only closing connections is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise BadInput(
                f"port {port} is in use or not allowed ({error.strerror}): choose another"
            ) from error
