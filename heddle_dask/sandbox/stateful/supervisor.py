"""The program between a worker and a command of a sandbox: it holds the command to its cores and ends all it started.

Imports the standard library only; `source()` is run with ``python -I -S -c``. It reads its order (a marshalled dict)
from standard input, which stays open for the life of the command: at its end, and so also at the death of the worker
from whatever cause, everything below this process is killed. It is a subreaper: a process that leaves its session or
loses its parent stays below it.

Keys of the order: ``argv``, ``environment``, ``folder``, ``cores`` (list, empty: any), ``limits`` (name of
`resource.RLIMIT_*` to value), ``status`` (file descriptor to which the exit code is written).
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import signal
import sys
import time

_SUBREAPER = 36
_KILL_S = 8.0


def below(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] not in (b"Z", b"X"):
                children.setdefault(int(fields[1]), []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:  # grows while it is read
        found.extend(children.get(pid, ()))
    return found


def kill_below(root: int) -> None:
    """Kill until no process is left below; what has ended is reaped."""
    deadline_s = time.monotonic() + _KILL_S
    while time.monotonic() < deadline_s:
        victims = below(root)
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            if victims:
                time.sleep(0.001)
        except ChildProcessError:
            if not victims:
                return


def start(order: dict) -> int:  # type: ignore[type-arg]
    """Start the command; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        if order["cores"]:
            os.sched_setaffinity(0, order["cores"])
        for name, value in order["limits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.chdir(order["folder"])
        os.execve(order["argv"][0], order["argv"], order["environment"])
    except BaseException as error:
        os.write(2, f"sandbox: {order['argv'][0]}: {error}\n".encode())
    os._exit(127)


def reap_others(spared: int) -> None:
    """Reap what came to this process and has ended: it would count towards the limit of processes."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == spared:
            return
        os.waitpid(ended.si_pid, 0)


def source() -> str:
    """Text of this file with the call that starts it."""
    with open(__file__, encoding="utf-8") as file:
        return file.read() + "\nmain()\n"


def main() -> None:
    """Read the order, run the command, kill the rest."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = marshal.load(sys.stdin.buffer)
    os.set_inheritable(order["status"], False)
    pid = start(order)
    child = os.pidfd_open(pid)
    waits = select.poll()
    for descriptor in (0, child):
        waits.register(descriptor, select.POLLIN | select.POLLHUP)
    while True:
        ready = [descriptor for descriptor, _ in waits.poll(500)]
        if not ready:
            reap_others(pid)
            continue
        if child in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(order["status"], str(code if code >= 0 else 128 - code).encode())
            break
        if not os.read(0, 4096):
            break
    kill_below(os.getpid())
