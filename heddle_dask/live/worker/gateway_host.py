"""The gateway of a tool worker: a process of its own, started on first use, started again when it dies.

The worker opens its sockets and keeps them: sandboxes have the directory of the Unix socket, and connections that come
while no process runs wait for the next one. Orders of agents go on to the scheduler, answers and texts to the process.
Belongs to the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import LONGEST_SOCKET_PATH_BYTES, LOOPBACK
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.gateway_frames import (
    ANSWER,
    BUFFER_BYTES,
    CANCEL,
    ORDER,
    READY,
    SESSION_ENDED,
    TEXT,
    read_frame,
    write_frame,
)
from heddle_dask.live.wire.gateway_messages import (
    GatewayAnswer,
    GatewayCancelled,
    GatewayOrder,
    GatewayPlace,
    GatewaySessionEnded,
    StartGateway,
    TakeText,
    TextTaken,
)
from heddle_dask.live.worker.gateway_tls import remote_sockets
from heddle_dask.live.worker.own_gpus import node_name

SOCKET_NAME = "gateway.sock"
DIED = "the gateway process was lost"
# The process imports where the worker does.
_PROGRAM = "import sys; sys.path[:] = sys.argv[5:]; from heddle_dask.live.worker.gateway_process import main; main()"
_START_S = 60.0
_FIRST_GAP_S = 0.1
_LONGEST_GAP_S = 5.0
_END_S = 2.0
_BACKLOG = 1024
_LOG = logging.getLogger(__name__)


class GatewayHost:
    """Starts the gateway of its worker, and relays for it.

    Parameters
    ----------
    name
        Begins the names of its processes; unique in the cluster.
    host
        At which other machines reach this one.
    send
        To the scheduler.
    """

    def __init__(self, name: str, host: str, send: Callable[[Message], None]) -> None:
        self._name = name
        self._host = host
        self._send = send
        self._numbers = itertools.count(1)
        self._place: GatewayPlace | None = None
        self._sockets: tuple[socket.socket, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._gateway = ""  # of the process that runs
        self._open: dict[int, str] = {}  # sessions of open orders, by number
        self._runs: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None

    async def place(self) -> GatewayPlace:
        """Where the gateway listens; starts it.

        Raises
        ------
        BadInput
            It cannot be started.
        """
        if self._place is None:
            self._place = self._listen()
        if self._runs is None:
            self._first = asyncio.get_running_loop().create_future()
            self._runs = asyncio.ensure_future(self._keep_running())
        assert self._first is not None
        try:
            await asyncio.wait_for(asyncio.shield(self._first), _START_S)
        except TimeoutError:
            raise BadInput(f"the gateway of {self._name} has not started in {_START_S:g} s") from None
        return self._place

    async def start(self, request: StartGateway) -> GatewayPlace:
        """The scheduler asks for it."""
        return await self.place()

    def _listen(self) -> GatewayPlace:
        # A directory of its own, which sandboxes of this user are given; its path must be short.
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) + 40 > LONGEST_SOCKET_PATH_BYTES:
            parent = "/tmp"
        directory = Path(tempfile.mkdtemp(prefix="heddle-gateway-", dir=parent))
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(str(directory / SOCKET_NAME))
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        tcp.bind((LOOPBACK, 0))
        self._sockets = (unix, tcp, *remote_sockets(self._host))
        for each in self._sockets:
            each.listen(_BACKLOG)  # what connects before the process runs waits
        urls = [f"https://{self._host}:{each.getsockname()[1]}" for each in self._sockets[2:]]
        return GatewayPlace(str(directory), tcp.getsockname()[1], node_name(), "".join(urls))

    async def _keep_running(self) -> None:
        gap_s = _FIRST_GAP_S
        while True:
            began_s = asyncio.get_running_loop().time()
            try:
                await self._run_once()
            except OSError as error:
                _LOG.warning("the gateway of %s did not start: %s", self._name, error)
            self._lost()
            if asyncio.get_running_loop().time() - began_s > _LONGEST_GAP_S:
                gap_s = _FIRST_GAP_S
            await asyncio.sleep(gap_s)
            gap_s = min(2 * gap_s, _LONGEST_GAP_S)

    async def _run_once(self) -> None:
        """Start a process, and relay until it has ended."""
        mine, theirs = socket.socketpair()
        files = [theirs.fileno(), *(each.fileno() for each in self._sockets)]
        named = [*map(str, files), ""][:4]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *named, *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=files,
                start_new_session=True,  # a signal of a terminal is for the worker
            )
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=mine, limit=BUFFER_BYTES)
        self._gateway = f"{self._name}/g{next(self._numbers)}"
        while (frame := await read_frame(reader)) is not None:
            self._take(*frame)

    def _take(self, kind: str, *values: Any) -> None:
        if kind == ORDER:
            number, session, key, body = values
            self._open[number] = session
            self._send(GatewayOrder(session, self._gateway, number, key, body))
        elif kind == CANCEL:
            number, session = values
            if self._open.pop(number, None) is not None:
                self._send(GatewayCancelled(session, self._gateway, (number,)))
        elif kind == READY and self._first is not None and not self._first.done():
            self._first.set_result(None)

    def _lost(self) -> None:
        """The process has gone: nobody waits for its orders any more."""
        self._end_process()
        sessions: dict[str, list[int]] = {}
        for number, session in self._open.items():
            sessions.setdefault(session, []).append(number)
        self._open.clear()
        for session, numbers in sessions.items():
            self._send(GatewayCancelled(session, self._gateway, tuple(numbers), DIED))

    def _end_process(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    # -- from the cluster --------------------------------------------------------------------------

    def answer(self, _: str, message: GatewayAnswer) -> None:
        """The driver has answered an order; one of a process that has gone is dropped."""
        if message.gateway == self._gateway and self._open.pop(message.number, None) is not None:
            self._tell(ANSWER, message.number, message.body)

    async def take_text(self, request: TakeText) -> TextTaken:
        """Text of running steps, from the workers of their engines."""
        for each in request.texts:
            if each.gateway == self._gateway and each.number in self._open:
                self._tell(TEXT, each.number, each.choice, each.start, each.text)
        return TextTaken()

    def session_ended(self, _: str, message: GatewaySessionEnded) -> None:
        """Nobody answers the orders of a session any more."""
        self._open = {number: session for number, session in self._open.items() if session != message.session}
        self._tell(SESSION_ENDED, message.session, message.reason)

    def _tell(self, *values: Any) -> None:
        if self._writer is not None:
            write_frame(self._writer, *values)

    async def close(self) -> None:
        """End the process, and remove its directory."""
        if self._runs is not None:
            self._runs.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runs
        self._lost()
        for each in self._sockets:
            each.close()
        if self._place is not None:
            shutil.rmtree(self._place.directory, ignore_errors=True)
            self._place = None
