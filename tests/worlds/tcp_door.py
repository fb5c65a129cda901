"""A TCP port of loopback that leads to a Unix socket: a process of a cluster, seen as an endpoint elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Callable, Iterator


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        with source.makefile("rb", buffering=0) as read, sink.makefile("wb", buffering=0) as write:
            shutil.copyfileobj(read, write)
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def tcp_door(path: Callable[[], str]) -> Iterator[int]:
    """Yields the port; `path` is asked at each connection."""
    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    outer, inner = server.accept()[0], socket.socket(socket.AF_UNIX)
                    opened.extend((outer, inner))
                    inner.connect(path())
                    for pair in ((outer, inner), (inner, outer)):
                        threading.Thread(target=_pass_on, args=pair, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            for each in opened:
                each.close()
