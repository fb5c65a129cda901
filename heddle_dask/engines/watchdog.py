"""A parent-death watchdog: when the owner of an engine dies, for any reason, the engine is ended.

Runs as its own program (`python watchdog.py ...`, standard library only, no import of this package), so that it starts
in milliseconds and stays small. The chain of processes is::

    owner ── guard ── watchdog ── engine (own session) ── processes that the engine starts

- The *guard* and the *watchdog* both wait for the end of the pipe that the owner holds open, the end of the owner (a
  pidfd, since a forked sibling may hold a copy of the pipe), and the end of each other. The first to see one of these
  kills the engine's whole tree. So SIGKILL of the owner, of the guard, of the watchdog, or of the owner and one of the
  two leaves no process behind.
- The engine itself has PDEATHSIG, for the case that all three are killed at once. Its children may then survive
  (vLLM's engine core does): a record in `records` lets `stale_engines.py` end them before the next engine starts.
- The tree is found by session, by descent (guard and watchdog are subreapers, so orphans stay below them) and by a
  mark in the environment, which a process keeps even if it leaves both.

The guard exits with the engine's exit status (128 + n when signal n ended it). SIGTERM to the guard
asks the engine to end, and kills the tree `grace` seconds later.

In a job of a batch system SIGTERM may reach every process. There the owner starts the guard with SIGTERM blocked, which
all below it inherit, and SIGINT takes its place.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable

MARK = "HEDDLE_ENGINE_MARK"
RECORD_SUFFIX = ".watchdog.json"

SHIELDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# In the environment of what a job of a batch system starts: these signals are for the job's main process.
SHIELDED_VARIABLE = "HEDDLE_SHIELDED"

_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_ROUNDS = 600
_LONGEST_ROUND_S = 0.05
_TRACKED_S = 2.0


# ------------------------------------------------------------------------------ processes in /proc


def _stat(pid: int) -> tuple[str, int, int, int] | None:
    """State letter, parent, session and start time (clock ticks since boot); None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold spaces and parentheses itself.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19])


def start_time(pid: int) -> int:
    """Start time of a live process in clock ticks since boot; 0 when there is none.

    A pid alone is reused; pid and start time identify a process.
    """
    stat = _stat(pid)
    return 0 if stat is None or stat[0] in "ZX" else stat[3]


def any_stopped(pid: int) -> bool:
    """Whether this process, or another of its session, is stopped (by SIGSTOP; not one that a debugger holds)."""
    own = _stat(pid) if pid else None
    if own is None:
        return False
    session = own[2]
    return any(state == "T" and sid == session for state, _, sid, _ in _living().values())


def carries_mark(pid: int, mark: str) -> bool:
    """Whether a process has the mark in its environment, as all processes of that engine have."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{MARK}={mark}".encode() in file.read().split(b"\0")
    except OSError:
        return False  # ended, or another user's process, which is not part of this tree


def _living() -> dict[int, tuple[str, int, int, int]]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = _stat(int(name))
            if stat is not None and stat[0] not in "ZX":
                found[int(name)] = stat
    return found


def _tree(session: int, mark: str, root: int, spared: set[int]) -> list[int]:
    """Live processes of the engine: in its session, below `root`, or with its mark."""
    living = _living()
    below = {root} if root else set()
    grew = True
    while grew:
        grew = False
        for pid, (_, parent, _, _) in living.items():
            if parent in below and pid not in below:
                below.add(pid)
                grew = True
    return [
        pid
        for pid, (_, _, sid, _) in sorted(living.items())
        if pid not in spared
        and ((session and sid == session) or (pid in below and pid != root) or carries_mark(pid, mark))
    ]


def kill_tree(session: int, mark: str, root: int = 0, spared: frozenset[int] = frozenset()) -> int:
    """SIGKILL the engine's processes until none is left; returns how many signals went out.

    Repeats for up to about 30 s, since a process may fork between being listed and being killed, and a process that
    frees GPU memory takes seconds to end. With `root` (the caller itself: guard or watchdog) the caller's descendants
    are killed too, and reaped; without it the caller's children are not touched.

    Python's trackers of resources come last: they remove the semaphores and the shared memory of the killed, and end.
    """
    sent = 0
    tracked_until_s = time.monotonic() + _TRACKED_S
    for round_index in range(_KILL_ROUNDS):
        targets = _tree(session, mark, root, {os.getpid(), *spared})
        spare_trackers = time.monotonic() < tracked_until_s
        for pid in targets:
            if spare_trackers and _tracks_resources(pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                sent += 1
        if root:
            _reap()
        if not targets:
            break
        time.sleep(min(_LONGEST_ROUND_S, 0.005 * 2 ** min(round_index, 6)))
    return sent


def _tracks_resources(pid: int) -> bool:
    """Whether a process is the one that `multiprocessing` starts beside a program, to clean up behind it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"from multiprocessing.resource_tracker import main" in file.read()
    except OSError:
        return False


def _reap() -> dict[int, int]:
    """Collect ended children; their wait statuses by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


# ------------------------------------------------------------------------------ shared memory

_SHARED_MEMORY = "/dev/shm"
# Semaphores and shared memory as Python, PyTorch and NCCL name theirs; what programs name themselves may be data.
_SHARED_NAMES = ("sem.mp-", "psm_", "torch_", "nccl-")


def _shared_by(pids: Iterable[int]) -> set[str]:
    """Names of the semaphores and the shared memory that processes have mapped."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            # A semaphore is mapped before it has its name.
            inodes |= {int(line.split(maxsplit=5)[4]) for line in file if _SHARED_MEMORY in line}
    try:
        entries = [each for each in os.scandir(_SHARED_MEMORY) if each.name.startswith(_SHARED_NAMES)]
    except OSError:
        return set()
    return {entry.name for entry in entries if entry.inode() in inodes}


def _remove_shared(names: Iterable[str]) -> None:
    """Remove what is left of them, and what no process uses: a tracker that was killed has not done so."""
    left = {name for name in names if name.startswith(_SHARED_NAMES) and os.path.isfile(f"{_SHARED_MEMORY}/{name}")}
    for name in left - _shared_by(_living() if left else ()):
        if "/" not in name:
            with contextlib.suppress(OSError):
                os.unlink(f"{_SHARED_MEMORY}/{name}")


# ------------------------------------------------------------------------------ records


def boot_id() -> str:
    """The id of this boot of the machine; empty where the kernel tells none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def record_name(mark: str) -> str:
    return f"engine-{mark}{RECORD_SUFFIX}"


def socket_name(mark: str) -> str:
    """Name of the socket, beside the record, on which an engine may listen."""
    return f"engine-{mark}.sock"


def temporary_name(mark: str) -> str:
    """Name of the directory, beside the record, for an engine's temporary files and own sockets."""
    return f"tmp-{mark}"


def remove_files(records: str, mark: str) -> None:
    """Remove the record, the socket, the temporary files and the shared memory of an engine that has ended."""
    with (
        contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError),
        open(os.path.join(records, record_name(mark)), encoding="utf-8") as file,
    ):
        _remove_shared(json.load(file)["shared"])
    shutil.rmtree(os.path.join(records, temporary_name(mark)), ignore_errors=True)
    for name in (record_name(mark), socket_name(mark)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(records, name))


def write_record(
    path: str, *, engine: int, mark: str, owner: int, owner_started: int, shared: Iterable[str] = ()
) -> None:
    """Record a running engine, so that a later start can find it when its owner has died."""
    record = {
        "engine": engine,
        "engine_started": start_time(engine),
        "mark": mark,
        "owner": owner,
        "owner_started": owner_started,
        "boot_id": boot_id(),
        "host": os.uname().nodename,
        "shared": sorted(shared),
    }
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(path + ".part", path)


# ------------------------------------------------------------------------------ guard and watchdog


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _pidfd(pid: int) -> int:
    """A file descriptor that becomes readable when the process ends; -1 on old kernels."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def end_signal() -> signal.Signals:
    """The signal that asks a process with the same blocked signals to end: SIGTERM, or SIGINT where that is blocked."""
    return signal.SIGINT if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()) else signal.SIGTERM


class _Record:
    """Of a running engine, kept up to date with the shared memory that its processes use."""

    def __init__(self, options: argparse.Namespace, engine: int) -> None:
        self._options = options
        self._engine = engine
        self._shared: set[str] | None = None
        self._pause_s, self._due_s = 0.5, 0.0

    def keep(self) -> None:
        """Look again if it is time: seldom later on."""
        if time.monotonic() < self._due_s:
            return
        self._due_s, self._pause_s = time.monotonic() + self._pause_s, min(64.0, 4 * self._pause_s)
        of = self._options
        shared = _shared_by(_tree(self._engine, of.mark, os.getpid(), set()))
        if shared != self._shared:
            self._shared = shared
            path = os.path.join(of.records, record_name(of.mark))
            owner, started = of.owner, of.owner_started
            write_record(path, engine=self._engine, mark=of.mark, owner=owner, owner_started=started, shared=shared)


class _Alarm:
    """Signals as bytes in a pipe, so that one poll waits for everything."""

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in _HANDLED_SIGNALS:
            signal.signal(number, lambda _number, _frame: None)

    def drain(self) -> set[int]:
        try:
            return set(os.read(self.read_fd, 4096))
        except BlockingIOError:
            return set()


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _watch(
    options: argparse.Namespace, alarm: _Alarm, child: int, session: int, upper: int, record: _Record | None = None
) -> int:
    """Wait for the end of `child`, of the owner or of the process above; returns the exit code.

    `session` is the engine's session in the watchdog, 0 in the guard, which does not know it.
    """
    poll = select.poll()
    fds = [options.pipe, _pidfd(options.owner), _pidfd(upper)]
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN | select.POLLHUP)
    poll.register(alarm.read_fd, select.POLLIN)
    deadline = None
    while True:
        if record is not None and deadline is None:
            record.keep()
        # Without pidfds the owner's end shows in its start time; look once a second.
        timeout_s = 1.0 if deadline is None else max(0.0, deadline - time.monotonic())
        ready = {fd for fd, _ in poll.poll(int(1000 * min(timeout_s, 1.0)) + 1)}
        numbers = alarm.drain()
        ended = _reap()
        if child in ended:
            _end_tree(session, options.mark, upper, child)
            return _exit_code(ended[child])
        if ready & {fd for fd in fds if fd >= 0} or os.getppid() != upper or not _owner_lives(options):
            _end_tree(session, options.mark, upper, child)
            return 128 + signal.SIGKILL
        if numbers & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} and deadline is None:
            os.kill(child, end_signal())
            # The guard waits longer, so that the watchdog can do the killing.
            deadline = time.monotonic() + options.grace + (0.0 if session else 5.0)
        if deadline is not None and time.monotonic() >= deadline:
            _end_tree(session, options.mark, upper, child)
            return 128 + signal.SIGKILL


def _end_tree(session: int, mark: str, upper: int, child: int) -> None:
    """Kill the engine's processes; the guard kills its watchdog last.

    If the guard killed the watchdog first and then died, no process would be left to end the engine's children.
    """
    if not session:
        kill_tree(session, mark, os.getpid(), frozenset({upper, child}))
    kill_tree(session, mark, os.getpid(), frozenset({upper}))


def _owner_lives(options: argparse.Namespace) -> bool:
    return start_time(int(options.owner)) == int(options.owner_started)


def _fork_engine(options: argparse.Namespace, engine_argv: list[str], mask: set[int | signal.Signals]) -> int:
    watchdog = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watchdog:  # the watchdog died before the line above took effect
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in _HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        # A signal that came since the fork ends the engine here.
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for assignment in options.env:
            name, _, value = assignment.partition("=")
            os.environ[name] = value
        os.environ[MARK] = options.mark
        # Programs that rename themselves (vLLM does) otherwise overwrite the mark in /proc.
        os.environ["SPT_NOENV"] = "1"
        os.execvp(engine_argv[0], engine_argv)
    except OSError as error:
        os.write(2, f"watchdog: cannot start {engine_argv[0]}: {error}\n".encode())
    os._exit(127)


def _run_watchdog(
    options: argparse.Namespace, engine_argv: list[str], guard: int, mask: set[int | signal.Signals]
) -> int:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    alarm = _Alarm()
    engine = _fork_engine(options, engine_argv, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return _watch(options, alarm, engine, engine, guard, _Record(options, engine))


def main(argv: list[str]) -> int:
    """Run the part of `argv` behind `--` as an engine under the watchdog; returns its exit code."""
    split = argv.index("--")
    parser = argparse.ArgumentParser(prog="watchdog")
    parser.add_argument("--pipe", type=int, required=True, help="read end; it closes when the owner ends")
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--owner-started", type=int, required=True)
    parser.add_argument("--mark", required=True)
    parser.add_argument("--records", required=True)
    parser.add_argument("--grace", type=float, default=10.0)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(argv[:split])
    guard = os.getpid()
    os.set_inheritable(options.pipe, False)  # the engine does not inherit it
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    owner_is_parent = os.getppid() == options.owner
    if not owner_is_parent or not _owner_lives(options):
        return 128 + signal.SIGKILL
    # Each process holds its signals back until they mean something to it: one that met the handlers of the process
    # above, between fork and exec, would be lost, and the engine would run on until the grace is over.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    watchdog = os.fork()
    if watchdog == 0:
        os._exit(_run_watchdog(options, argv[split + 1 :], guard, mask))
    alarm = _Alarm()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = _watch(options, alarm, watchdog, 0, options.owner)
    remove_files(options.records, options.mark)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
