"""The gateway process of a tool worker: serves the APIs over sockets that the worker has opened, and ends with it.

``python -m heddle_dask.live.worker.gateway_process LINK UNIX TCP TLS``: numbers of open files, a pair to the worker and
those that listen; TLS may be empty. They outlive a gateway that dies: its clients connect again to the next one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop
from aiohttp import web

from heddle_dask.gateway.server import gateway_application, gateway_runner
from heddle_dask.live.wire.gateway_frames import BUFFER_BYTES, READY, write_frame
from heddle_dask.live.worker.gateway_link import GatewayLink
from heddle_dask.live.worker.gateway_tls import tls_context

_BACKLOG = 1024


async def serve(link_fd: int, plain_fds: Sequence[int], tls_fds: Sequence[int]) -> None:
    """Serve until the tool worker has gone."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=link_fd), limit=BUFFER_BYTES)
    link = GatewayLink(reader, writer)
    runner = gateway_runner(gateway_application(link.exchange))
    await runner.setup()
    for number in (*plain_fds, *tls_fds):
        context = tls_context() if number in tls_fds else None
        await web.SockSite(runner, socket.socket(fileno=number), ssl_context=context, backlog=_BACKLOG).start()
    write_frame(writer, READY)
    await link.run()
    os._exit(0)  # open requests have nobody who could answer them


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the worker says when
    link, *plain, tls = sys.argv[1:5]
    uvloop.run(serve(int(link), [*map(int, plain)], [int(tls)] if tls else []))


if __name__ == "__main__":
    main()
