"""Forwards connections to a gateway: a thread of the supervisor of a command (`supervisor`).

Each connection to the socket that the command's network has (`own_network`) becomes one to the gateway's Unix socket.
Bytes go both ways as they come; an end on one side is told to the other. A side that does not read stops the side that
writes, after `_MOST_BYTES`. A gateway that is not there closes the connection at once.

Imports the standard library only: the supervisor runs the text of this file.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading

_MOST_BYTES = 1 << 18
_CONNECT_S = 10
# Each is two open files of the supervisor, which may have a thousand. More wait to be accepted.
_MOST_CONNECTIONS = 400
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Side:
    """One end of a connection.

    Attributes
    ----------
    other
        The end to which all goes that is read here.
    to_write
        Bytes that came from the other end.
    read_all
        Whether no more comes from here.
    told_end
        Whether the end of the other's bytes was passed on here.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end = end
        self.other = self
        self.to_write = bytearray()
        self.read_all = False
        self.told_end = False
        self.closed = False
        self.registered = 0

    def take(self) -> None:
        """Read once."""
        with contextlib.suppress(BlockingIOError):
            chunk = self.end.recv(_MOST_BYTES)
            self.other.to_write += chunk
            self.read_all = not chunk

    def give(self) -> None:
        """Write what can be written; pass the end on after the last byte."""
        if self.to_write:
            with contextlib.suppress(BlockingIOError):
                del self.to_write[: self.end.send(self.to_write)]
        if self.other.read_all and not self.to_write and not self.told_end:
            self.told_end = True
            self.end.shutdown(socket.SHUT_WR)

    @property
    def awaited(self) -> int:
        """What is waited for here."""
        reads = not self.read_all and len(self.other.to_write) < _MOST_BYTES
        return _READ * reads | _WRITE * bool(self.to_write)


class Forwarder:
    """Connections from a listening socket to a Unix socket."""

    def __init__(self, listener: socket.socket, path: str) -> None:
        self._listener = listener
        self._path = path
        self._waits = selectors.DefaultSelector()
        self._listens = False
        self._open = 0
        listener.setblocking(False)

    def serve(self) -> None:
        """Forward without end: the process ends it."""
        while True:
            self._listen(self._open < _MOST_CONNECTIONS)
            for key, ready in self._waits.select():
                if key.data is None:
                    self._accept()
                else:
                    self._pass_on(key.data, ready)

    def _listen(self, wanted: bool) -> None:
        if wanted and not self._listens:
            self._waits.register(self._listener, _READ)
        elif self._listens and not wanted:
            self._waits.unregister(self._listener)
        self._listens = wanted

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        gateway = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # The time limit of a socket of Python would not wait where the gateway has many to accept.
        gateway.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_S, 0))
        try:
            gateway.connect(self._path)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            gateway.close()
            client.close()
            return
        inner, outer = Side(client), Side(gateway)
        inner.other, outer.other = outer, inner
        self._open += 1
        self._wait_for(inner)
        self._wait_for(outer)

    def _pass_on(self, side: Side, ready: int) -> None:
        if side.closed:  # by its other side, in this round
            return
        try:
            if ready & _READ:
                side.take()
            side.give()
            side.other.give()
        except OSError:
            self._close(side)
            return
        if side.told_end and side.other.told_end:
            self._close(side)
            return
        self._wait_for(side)
        self._wait_for(side.other)

    def _wait_for(self, side: Side) -> None:
        if side.awaited == side.registered:
            return
        if not side.registered:
            self._waits.register(side.end, side.awaited, side)
        elif not side.awaited:
            self._waits.unregister(side.end)
        else:
            self._waits.modify(side.end, side.awaited, side)
        side.registered = side.awaited

    def _close(self, side: Side) -> None:
        self._open -= 1
        for each in (side, side.other):
            if each.registered:
                self._waits.unregister(each.end)
                each.registered = 0
            each.closed = True
            each.end.close()


def forward(channel: socket.socket, path: str) -> None:
    """Forward from the socket that comes through `channel`, if one does, in a thread of its own."""

    def run() -> None:
        _, given, _, _ = socket.recv_fds(channel, 64, 1)
        channel.close()
        if given:
            Forwarder(socket.socket(fileno=given[0]), path).serve()

    threading.Thread(target=run, daemon=True).start()


def source() -> str:
    """Text of this file."""
    with open(__file__, encoding="utf-8") as file:
        return file.read()
