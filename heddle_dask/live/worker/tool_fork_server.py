"""The fork server of a tool worker: forks the processes in which plain tool functions run.

Runs as its own program, started before the first call. It has one thread, so a fork is safe, and has imported what a
call needs, so a fork takes milliseconds. Its first argument is a Unix socket to the tool worker (SOCK_SEQPACKET):

- from the worker: `FORK` with a number and one end of a socket pair, on which the new process is sent its calls;
  `KILL` with a number, which ends the process and its process group;
- to the worker: the number of a process that has ended, and its wait status.

The chain ends with the worker, however that ends: its socket closes, and the server kills every process. A process
whose server was killed gets SIGKILL from the kernel (PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

from heddle_dask.engines.watchdog import SHIELDED_SIGNALS, SHIELDED_VARIABLE

REQUEST = struct.Struct("!cQ")
ENDED = struct.Struct("!Qi")
FORK, KILL = b"F", b"K"

# A frame on the socket of a process: a tag, the length of the body, the body.
FRAME = struct.Struct("!cQ")
PATH, CALL, VALUE, RAISED = b"P", b"C", b"V", b"R"

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the worker's end of the socket closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # A child that ends wakes the server: it reports the end at once.
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if SHIELDED_VARIABLE in os.environ:
        # Ignored here and in the processes of tools; what a tool starts has the usual signals.
        for number in SHIELDED_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SHIELDED_SIGNALS)
    numbers: dict[int, int] = {}
    try:
        while True:
            ready, _, _ = select.select([control, woken], [], [])
            if woken in ready:
                woken.recv(4096)
                _report_ended(control, numbers)
            if control in ready:
                message, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
                if not message:
                    return
                for descriptor in descriptors:
                    os.set_inheritable(descriptor, False)
                tag, number = REQUEST.unpack(message)
                if tag == KILL:
                    for pid in [pid for pid, each in numbers.items() if each == number]:
                        _kill(pid)
                elif (pid := os.fork()) == 0:
                    for other in (control, woken, wake):
                        other.close()
                    _serve_calls(socket.socket(fileno=descriptors[0]))
                else:
                    os.close(descriptors[0])
                    numbers[pid] = number
    except OSError:
        return  # the worker has gone in the middle of a message
    finally:
        for pid in numbers:
            _kill(pid)


def _report_ended(control: socket.socket, numbers: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            # What it has started and left behind in its group ends with it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            control.send(ENDED.pack(numbers.pop(pid), status))


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _serve_calls(calls: socket.socket) -> None:
    """The forked process: run calls one after the other until the socket closes."""
    code = 0
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while (frame := _receive(calls)) is not None:
            tag, body = frame
            if tag == PATH:
                sys.path[:] = body.decode().split("\0")
                continue
            answer_tag, answer = _answer(body)
            _flush()
            calls.sendall(FRAME.pack(answer_tag, len(answer)))
            calls.sendall(answer)
    except OSError:
        code = 1  # the worker has gone
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    """What a tool has printed goes to the worker's log: the process may end without another word."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _receive(calls: socket.socket) -> tuple[bytes, bytes] | None:
    head = _read(calls, FRAME.size)
    if head is None:
        return None
    tag, length = FRAME.unpack(head)
    body = _read(calls, length)
    return None if body is None else (tag, body)


def _read(calls: socket.socket, length: int) -> bytes | None:
    body = bytearray(length)
    view, at = memoryview(body), 0
    while at < length:
        taken = calls.recv_into(view[at:])
        if taken == 0:
            return None
        at += taken
    return bytes(body)


def _answer(body: bytes) -> tuple[bytes, bytes]:
    """Run one call; a pickled value, or the line and the traceback of what it raised."""
    try:
        payload, offered = cloudpickle.loads(body)
        return VALUE, call_pickled(payload, offered)
    except BaseException as error:  # SystemExit too: a tool does not end the process that the next one uses
        return RAISED, cloudpickle.dumps((one_line(error), traceback.format_exc()))


def call_pickled(payload: bytes, offered: dict[str, Any]) -> bytes:
    """Call a pickled (function, args, kwargs) and pickle its value; a coroutine that it returns is run.

    Parameters
    ----------
    offered
        Keyword arguments for the function, as far as it names them.
    """
    function, args, kwargs = cloudpickle.loads(payload)
    value = function(*args, **{**kwargs, **accepted(function, offered)})
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


async def _awaited(value: Any) -> Any:
    return await value


def accepted(function: Callable[..., Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that the function has a parameter for."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}  # a builtin without a signature takes none
    return {name: value for name, value in offered.items() if name in names}


def one_line(error: BaseException) -> str:
    """Type and first line of an error."""
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
