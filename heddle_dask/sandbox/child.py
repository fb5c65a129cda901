"""One child process on the event loop: feeds it when it is ready, keeps the first bytes it writes.

Not `asyncio.create_subprocess_exec`, for two reasons: on Python 3.11 it waits with one thread per child,
and its `wait` returns only when every holder of the pipes is gone. Starting costs the loop the same one
to two milliseconds in both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

from heddle_dask.sandbox.confinement import PreparedRun
from heddle_dask.sandbox.inside import READY

_CHUNK_BYTES = 65536


class Child:
    """A started process. Make it in the thread that runs the event loop, and `close` it always.

    The kernel's death signal, by which the child ends when we do, is tied to the thread that starts it.

    Attributes
    ----------
    pid
        Process id; also the id of its session and process group.
    output
        The first bytes of its standard output and standard error.
    output_over
        Set when it wrote more than that.
    output_ended
        Set when nobody holds its output open any longer.
    exited
        Set when it has exited and is reaped.
    """

    def __init__(self, prepared: PreparedRun, payload: bytes, most_output_bytes: int) -> None:
        self.output = bytearray()
        self.output_over = asyncio.Event()
        self.output_ended = asyncio.Event()
        self.exited = asyncio.Event()
        self._most_output_bytes = most_output_bytes
        self._left = memoryview(payload)
        self._ready = False
        self._loop = asyncio.get_running_loop()
        self._process = subprocess.Popen(
            prepared.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(prepared.environment),
            cwd=prepared.folder or "/",
            pass_fds=prepared.pass_fds,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid = self._process.pid
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        try:
            # Our own child, not reaped before `_on_exit`: its id cannot have been given to another.
            self._handle = os.pidfd_open(self.pid)
        except OSError:  # no descriptors left, or a kernel before 5.3: it has got no order yet
            self._process.kill()
            self._process.communicate()
            raise
        for stream in (self._stdin, self._stdout):
            os.set_blocking(stream.fileno(), False)
        self._loop.add_reader(self._handle, self._on_exit)
        self._loop.add_reader(self._stdout.fileno(), self._on_readable)

    @property
    def exit_status(self) -> int | None:
        """As a shell gives it, 128 + n for a death by signal n; None while it runs."""
        status = self._process.returncode
        return status if status is None or status >= 0 else 128 - status

    def close(self) -> None:
        """Let go of all descriptors. Does not kill."""
        self._close_stdin()
        self._close_stdout()
        if self._handle >= 0:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1
        self._process.poll()

    def _on_exit(self) -> None:
        self._process.wait()  # returns at once: the descriptor says that it has exited
        self._loop.remove_reader(self._handle)
        self.exited.set()

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._stdout.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._close_stdout()
            return
        if not self._ready and chunk.startswith(READY):
            chunk = chunk[len(READY) :]
            self._loop.add_writer(self._stdin.fileno(), self._on_writable)
        self._ready = True  # without the byte: a wrapper failed, and this is what it says
        room = self._most_output_bytes - len(self.output)
        self.output += chunk[:room]
        if len(chunk) > room:  # what is too much is dropped until the writer is killed
            self.output_over.set()

    def _on_writable(self) -> None:
        # A child that died early closes the pipe; its exit status tells that story, not this error.
        with contextlib.suppress(BlockingIOError):
            try:
                self._left = self._left[os.write(self._stdin.fileno(), self._left) :]
            except BrokenPipeError:
                self._left = self._left[:0]
        if not self._left:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if not self._stdin.closed:
            self._loop.remove_writer(self._stdin.fileno())
            self._stdin.close()

    def _close_stdout(self) -> None:
        if not self._stdout.closed:
            self._loop.remove_reader(self._stdout.fileno())
            self._stdout.close()
        self.output_ended.set()
