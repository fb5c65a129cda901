"""The program between a worker and a command of a sandbox: it holds the command to its cores and ends all it started.

Imports the standard library only; `source()` is run with ``python -I -S -c``. It reads its order (a marshalled dict)
from standard input, which stays open for the life of the command: at its end, and so also at the death of the worker
from whatever cause, everything below this process is killed. It is a subreaper: a process that leaves its session or
loses its parent stays below it.

Keys of the order: ``argv``, ``environment``, ``folder``, ``cores`` (list, empty: any), ``limits`` (name of
`resource.RLIMIT_*` to value), ``status`` (file descriptor for answers), ``frozen`` (whether it starts stopped),
``calls_filter`` (of system calls; empty where the confinement sets it), ``gateway`` (path of a Unix socket to which
connections of the command's own network are forwarded; empty: none), ``forwarder`` (its code, where it has one). More
orders follow, each a line that is answered by a line: ``freeze`` by ``frozen`` once nothing below runs any longer, or
by ``awake``; ``thaw 0,1`` (its cores) by ``thawed``. The last answer is ``exit CODE``.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import signal
import time

_SUBREAPER = 36
_KILL_S = 8.0
_FREEZE_S = 4.0


def states_below(root: int) -> dict[int, str]:
    """The live processes below `root` with the letters of their states.

    A process whose first thread has ended, which looks like a dead one, lives as long as its other threads.
    """
    children: dict[int, list[int]] = {}
    states = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] not in (b"Z", b"X") or int(fields[17]) > 1:
                children.setdefault(int(fields[1]), []).append(int(name))
                states[int(name)] = fields[0].decode()
    found = list(children.get(root, ()))
    for pid in found:  # grows while it is read
        found.extend(children.get(pid, ()))
    return {pid: states[pid] for pid in found}


def freeze() -> bool:
    """Stop all below this process; True once none of them runs any longer.

    One look at /proc is not enough: a process that runs may start another, behind the look. A process that sleeps in
    the kernel and has the signal (``D``: it waits for a disk, or for a child that is stopped) runs no more of its code.
    """
    deadline_s = time.monotonic() + _FREEZE_S
    signalled: set[int] = set()
    quiet_looks = 0
    while time.monotonic() < deadline_s:
        states = states_below(os.getpid())
        going = [pid for pid, state in states.items() if state not in "TtZ" and (state != "D" or pid not in signalled)]
        going += [pid for pid, state in states.items() if state == "Z" and threads_run(pid)]
        quiet_looks = 0 if going else quiet_looks + 1
        if quiet_looks == 2:
            return True
        for pid in going:
            signalled.add(pid)
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:
                continue
    return False


def threads_run(pid: int) -> bool:
    """Whether a thread of a process whose first thread has ended is not stopped."""
    for name in threads_of(pid):
        try:
            with open(f"/proc/{pid}/task/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] not in (b"T", b"t", b"Z", b"X"):
                    return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


def threads_of(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []


def thaw(cores: list[int]) -> None:
    """Let all below this process go on, on these cores (none: where it was)."""
    for pid in states_below(os.getpid()):
        for name in threads_of(pid) if cores else ():
            try:
                os.sched_setaffinity(int(name), cores)
            except OSError:
                continue
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def kill_below(root: int) -> None:
    """Kill until no process is left below; what has ended is reaped."""
    deadline_s = time.monotonic() + _KILL_S
    while time.monotonic() < deadline_s:
        victims = states_below(root)
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


def start(order: dict, given: int) -> int:  # type: ignore[type-arg]
    """Start the command, with this file as its standard input (negative: an empty one); returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        if order["cores"]:
            os.sched_setaffinity(0, order["cores"])
        if order["nice"]:
            yield_cores(order["nice"])
        for name, value in order["limits"].items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        os.dup2(os.open("/dev/null", os.O_RDONLY) if given < 0 else given, 0)
        os.chdir(order["folder"])
        if order["calls_filter"]:
            refuse_calls(order["calls_filter"])
        if order["frozen"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        os.execve(order["argv"][0], order["argv"], order["environment"])
    except BaseException as error:
        os.write(2, f"sandbox: {order['argv'][0]}: {error}\n".encode())
    os._exit(127)


def yield_cores(nice: int) -> None:
    """Let this process, and all that it starts, go after others: as `heddle_dask.isolation.granted.yield_cpus`."""
    os.setpriority(os.PRIO_PROCESS, 0, min(nice, 19))
    if nice > 19:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        with open("/proc/self/autogroup", "w", encoding="ascii") as autogroup:
            autogroup.write(str(min(nice, 19)))
    except OSError:
        pass


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


def refuse_calls(program: bytes) -> None:
    """Set the filter of system calls, irrevocably."""

    class _Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, more in ((38, 1, 0), (22, 2, ctypes.byref(_Filter(len(program) // 8, program)))):
        if libc.prctl(option, value, more, 0, 0):  # no new privileges, which a filter needs; a filter
            raise OSError(ctypes.get_errno(), "no filter of system calls")


def read_exactly(size: int) -> bytes:
    """The next bytes of standard input; nothing more is taken, so that `select` sees what follows."""
    content = b""
    while len(content) < size:
        chunk = os.read(0, size - len(content))
        if not chunk:
            raise SystemExit
        content += chunk
    return content


def obey(line: str) -> str:
    """Do what a later order says; the answer."""
    word, _, cores = line.partition(" ")
    if word == "freeze":
        return "frozen" if freeze() else "awake"
    thaw([int(each) for each in cores.split(",") if each])
    return "thawed"


def main() -> None:
    """Read the order, run the command, kill the rest."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)  # files that a command makes have the modes that it expects, in a job too
    order = marshal.loads(read_exactly(int.from_bytes(read_exactly(4), "big")))
    status = order["status"]
    os.set_inheritable(status, False)
    forwarder: dict = {}  # type: ignore[type-arg]
    if order["gateway"]:
        exec(order["forwarder"], forwarder)
        channel, inner = forwarder["socket"].socketpair()
        pid = start(order, inner.fileno())
        inner.close()
        forwarder["forward"](channel, order["gateway"])
    else:
        pid = start(order, -1)
    if order["frozen"]:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        os.write(status, b"frozen\n")
    child = os.pidfd_open(pid)
    waits = select.poll()
    for descriptor in (0, child):
        waits.register(descriptor, select.POLLIN | select.POLLHUP)
    begun = b""
    while True:
        ready = [descriptor for descriptor, _ in waits.poll(500)]
        if not ready:
            reap_others(pid)
            continue
        if child in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(status, f"exit {code if code >= 0 else 128 - code}\n".encode())
            break
        chunk = os.read(0, 4096)
        if not chunk:
            break
        *lines, begun = (begun + chunk).split(b"\n")
        for line in lines:
            os.write(status, obey(line.decode()).encode() + b"\n")
    kill_below(os.getpid())
