"""The fork server of a tool worker: forks the processes in which plain tool functions run.

Runs as its own program, started before the first call. It has one thread, so a fork is safe, and has imported what a
call needs, so a fork takes milliseconds. Its first argument is a Unix socket to the tool worker (SOCK_SEQPACKET):

- from the worker: `FORK` with a number, one end of a socket pair, on which the new process is sent its calls, and one
  of a pipe for what it prints; `SERVE` the same, for the process of coroutine functions (`coroutine_server`); `KILL`
  with a number, which ends the process and its process group;
- to the worker: `FORKED` with the number and the pid of a new process; `ENDED` with the number of a process that has
  ended, and its wait status.

What a call starts ends with it. The process of the call kills what is left below it before it answers; the server
kills what is left of a process that has ended, before it reports the end: both are subreapers, so nothing gets away
from below them by leaving its session or losing its parent.

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
import threading
from collections.abc import Callable, Collection
from typing import Any

import cloudpickle

from heddle_dask.engines.watchdog import SHIELDED_SIGNALS, SHIELDED_VARIABLE
from heddle_dask.isolation import process_tree
from heddle_dask.isolation.granted import Granted, running_with
from heddle_dask.live.worker.call_terms import lift_limits
from heddle_dask.live.worker.coroutine_server import serve_coroutines
from heddle_dask.live.worker.process_calls import (
    FRAME,
    JOIN,
    LAST_RAISED,
    LAST_VALUE,
    PATH,
    RAISED,
    USE,
    USED,
    VALUE,
    accepted,
    failure_of,
    receive,
)

REQUEST = struct.Struct("!cQ")
NOTICE = struct.Struct("!cQq")
FORK, SERVE, KILL, FORKED, ENDED = b"F", b"L", b"K", b"S", b"E"

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until the worker's end of the socket closes."""
    control = socket.socket(fileno=int(sys.argv[1]))
    # A child that ends wakes the server: it reports the end at once.
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    process_tree.become_subreaper()
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
                message, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 2)
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
                    serve = _serve_calls if tag == FORK else serve_coroutines
                    _serve(serve, socket.socket(fileno=descriptors[0]), descriptors[1])
                else:
                    for descriptor in descriptors:
                        os.close(descriptor)
                    numbers[pid] = number
                    control.send(NOTICE.pack(FORKED, number, pid))
    except OSError:
        return  # the worker has gone in the middle of a message
    finally:
        for pid in numbers:
            _kill(pid)
        process_tree.end_children()


def _report_ended(control: socket.socket, numbers: dict[int, int]) -> None:
    ended: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            # What it has started and left behind in its group ends with it; the kernel signals all of it at once.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            if pid in numbers:
                ended.append((numbers.pop(pid), status))
    if ended and process_tree.has_children():
        # What had left the group is a child of this process now, unlike the processes that serve calls.
        process_tree.end_children(spared=numbers)
    for number, status in ended:
        control.send(NOTICE.pack(ENDED, number, status))


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _serve(serve: Callable[[socket.socket], None], calls: socket.socket, output: int) -> None:
    """The forked process: serve until the socket closes."""
    code = 0
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        process_tree.become_subreaper()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _print_to(output)
        serve(calls)
    except OSError as error:
        code = 1  # the worker has gone, or the control group
        with contextlib.suppress(OSError):
            print(f"process for tools: {error!r}", file=sys.stderr)
    finally:
        _flush()
        os._exit(code)


def _serve_calls(calls: socket.socket) -> None:
    """Run calls of plain functions, one after the other."""
    idle_cores = os.sched_getaffinity(0)
    while (frame := receive(calls)) is not None:
        tag, body = frame
        if tag == PATH:
            sys.path[:] = body.decode().split("\0")
            continue
        if tag == JOIN:
            _join(body.decode().split("\0"))
            continue
        with running_with(Granted(use=lambda *use: calls.sendall(FRAME.pack(USED, USE.size) + USE.pack(*use)))):
            answer_tag, answer = _answer(body, idle_cores)
        _flush()
        calls.sendall(FRAME.pack(answer_tag, len(answer)))
        calls.sendall(answer)
        if answer_tag in (LAST_VALUE, LAST_RAISED):
            return


def _print_to(output: int) -> None:
    """Standard output and error go to the worker, line by line: the process may be killed in the middle of a call."""
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    # Not `reconfigure`: the old streams were made for files of another kind.
    sys.stdout, sys.stderr = (
        os.fdopen(number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False) for number in (1, 2)
    )


def _join(files: list[str]) -> None:
    for path in files:
        with open(path, "w", encoding="ascii") as file:
            file.write("0")


def _flush() -> None:
    """What a tool has printed goes to the worker's log: the process may end without another word."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _answer(body: bytes, idle_cores: Collection[int]) -> tuple[bytes, bytes]:
    """Run one call; a pickled value, or line, traceback, cause and seconds to wait of what it raised."""
    payload, offered, terms = cloudpickle.loads(body)
    threads = set(threading.enumerate())
    try:
        terms.apply()
        tag, answer = VALUE, call_pickled(payload, offered)
    except BaseException as error:  # SystemExit too: a tool does not end the process that the next one uses
        lift_limits()
        tag = RAISED
        line, detail, cause, retry_after_s = failure_of(error)
        raised = (line, detail, terms.cause_of(error) or cause, retry_after_s)
        answer = cloudpickle.dumps(raised)
    # Before the answer, with which the cores go to another action.
    left = process_tree.has_children() and process_tree.end_children()
    terms.take_back(idle_cores)
    if left or not threads.issuperset(threading.enumerate()):
        tag = LAST_VALUE if tag == VALUE else LAST_RAISED
    return tag, answer


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
