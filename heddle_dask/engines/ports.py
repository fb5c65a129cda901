"""Loopback ports, for what speaks no Unix sockets: NIXL's side channel, and routers in benchmarks."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A loopback port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
