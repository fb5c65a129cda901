"""One child process on the event loop: writes its input when it is ready, keeps the first bytes of its output.

Not `asyncio.create_subprocess_exec`, for two reasons: on Python 3.11 it uses one waiting thread per child, and its
`wait` returns only after every holder of the pipes has closed them. Both block the loop for one to two milliseconds
per start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

from heddle_dask.isolation.granted import Granted, granted
from heddle_dask.sandbox.confinement import PreparedRun
from heddle_dask.sandbox.inside import READY

_CHUNK_BYTES = 65536


class Child:
    """A started process. Make it in the thread of the event loop, and always `close` it.

    The kernel's parent-death signal, which ends the child when this process dies, is tied to the starting thread.

    Attributes
    ----------
    pid
        Process id; also the id of its session and process group.
    output
        The first bytes of its standard output and standard error.
    output_over
        Set when it has written more than is kept.
    output_ended
        Set when no process has its output open any longer.
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
        given = granted() or Granted()
        with given.starting():
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
        given.adopt(self._process.pid)
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid = self._process.pid
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        try:
            # An own child that is not reaped before `_on_exit`: its pid cannot have been reused.
            self._handle = os.pidfd_open(self.pid)
        except OSError:  # no descriptors left, or a kernel before 5.3; the child has no order yet
            self._process.kill()
            self._process.communicate()
            raise
        for stream in (self._stdin, self._stdout):
            os.set_blocking(stream.fileno(), False)
        self._loop.add_reader(self._handle, self._on_exit)
        self._loop.add_reader(self._stdout.fileno(), self._on_readable)

    @property
    def exit_status(self) -> int | None:
        """Exit status as in a shell, 128 + n after signal n; None while the process runs."""
        status = self._process.returncode
        return status if status is None or status >= 0 else 128 - status

    def close(self) -> None:
        """Close all descriptors. Does not kill the process."""
        self._close_stdin()
        self._close_stdout()
        if self._handle >= 0:
            self._loop.remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1
        self._process.poll()

    def _on_exit(self) -> None:
        self._process.wait()  # returns at once: the process has exited
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
        self._ready = True  # without the ready byte a wrapper failed, and this is its message
        room = self._most_output_bytes - len(self.output)
        self.output += chunk[:room]
        if len(chunk) > room:  # excess output is dropped until the writer is killed
            self.output_over.set()

    def _on_writable(self) -> None:
        # A child that died early closes the pipe; its exit status reports that, not this error.
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
