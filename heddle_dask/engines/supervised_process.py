"""A supervised program: it writes to a log, ends on request, and never outlives its owner.

See `watchdog` for how the whole process tree is ended when the owner dies. What engines of dead owners have left behind
all the same, processes, records and sockets, is ended here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from heddle_dask.core.errors import HeddleError
from heddle_dask.engines import watchdog

_HOST = os.uname().nodename


def kill_stale(records: str) -> list[int]:
    """Kill the processes left by engines of dead owners; returns the pids of those engines.

    A record is believed only as far as it can do no harm: it must be a file of this user, and a process is killed only
    if it carries the record's mark, or is in the session of a leader that does.

    Parameters
    ----------
    records
        Directory of the records. Those of living owners are left alone; spent ones are removed, with their sockets.
    """
    killed: list[int] = []
    try:
        names = sorted(os.listdir(records))
    except FileNotFoundError:
        return killed
    for name in names:
        if not (name.startswith("engine-") and name.endswith(watchdog.RECORD_SUFFIX)):
            continue
        path = os.path.join(records, name)
        mark = name.removeprefix("engine-").removesuffix(watchdog.RECORD_SUFFIX)
        try:
            record = _own_record(path)
            if record is None:
                continue
            engine, engine_started = int(record["engine"]), int(record["engine_started"])
            owner, owner_started = int(record["owner"]), int(record["owner_started"])
            boot_id = record["boot_id"]
            if record.get("host", _HOST) != _HOST:
                continue  # the directory is shared with another machine or a container
            broken = not mark or record["mark"] != mark
        except (ValueError, OverflowError, KeyError, TypeError):
            broken = True  # half-written when the machine went down: names no process
        if not broken and boot_id == watchdog.boot_id():
            if watchdog.start_time(owner) == owner_started:
                continue
            # Pids are reused: the session counts only if its leader is the recorded engine, and carries the mark.
            leads = watchdog.start_time(engine) == engine_started and watchdog.carries_mark(engine, mark)
            if watchdog.kill_tree(engine if leads else 0, mark):
                killed.append(engine)
            if _answers(os.path.join(records, watchdog.socket_name(mark))):
                continue  # an engine in another PID namespace, where its owner may live
        watchdog.remove_files(records, mark)
    return killed


def _answers(path: str) -> bool:
    """Whether a process listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
        return True


def _own_record(path: str) -> dict[str, int | str] | None:
    """The content of a record; None when it is gone, is a link, or belongs to another user."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(handle, encoding="utf-8") as file:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            return None
        return dict(json.load(file))


_POLL_S = 0.05
_TAIL_BYTES = 64 * 1024


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """What is started meanwhile has these signals blocked, and so has all that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watchdog.SHIELDED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def log_tail(path: Path, lines: int, start_bytes: int = 0) -> tuple[str, ...]:
    """The last lines of a log, from `start_bytes` on, without empty ones; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start_bytes, end - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple([line.rstrip() for line in text.splitlines() if line.strip()][-lines:])


class SupervisedProcess:
    """One program that this process owns.

    Parameters
    ----------
    directory
        Made when absent; receives ``NAME.log``.
    records
        Directory of the records by which `clear_stale` finds the processes of dead owners; None: `directory`.
    mark
        The word in the environment by which its processes are recognised; None: a random one.
    grace_s
        Seconds between the first signal and the SIGKILL of `stop`.
    shielded
        Block SIGTERM and SIGUSR1 in the program: a batch system may send these to every process of a job, and it is for
        the job's main process to end the others in order. So it is too below a program that was started in this way.
    """

    def __init__(
        self,
        argv: Sequence[str],
        directory: Path,
        name: str,
        *,
        env: Mapping[str, str] | None = None,
        records: Path | None = None,
        mark: str | None = None,
        grace_s: float = 5.0,
        shielded: bool = False,
    ) -> None:
        self.argv = tuple(argv)
        self.name = name
        self.directory = Path(directory)
        self.records = Path(records) if records is not None else self.directory
        self.log_path = self.directory / f"{name}.log"
        self._env = dict(env or {})
        self._grace_s = grace_s
        self._shielded = shielded or watchdog.SHIELDED_VARIABLE in os.environ
        self._mark = mark or secrets.token_hex(8)
        self._popen: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._log_start_bytes = 0

    @property
    def pid(self) -> int:
        """Pid of the program's guard process; SIGKILL to it ends the program. 0 before `launch`."""
        return self._popen.pid if self._popen is not None else 0

    @property
    def program_pid(self) -> int:
        """Pid of the program itself; 0 when it is not running."""
        path = self.records / watchdog.record_name(self._mark)
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["engine"])
        except FileNotFoundError:
            return 0

    def is_stopped(self) -> bool:
        """Whether a process of the program is stopped (SIGSTOP): it runs no more, and has not ended."""
        return watchdog.any_stopped(self.program_pid)

    @property
    def returncode(self) -> int | None:
        """Exit code, None while the program runs (and before `launch`)."""
        return self._popen.poll() if self._popen is not None else None

    async def clear_stale(self) -> None:
        """End the processes of dead owners that `records` names."""
        self.records.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(kill_stale, str(self.records))

    def launch(self) -> None:
        if self._popen is not None:
            raise HeddleError(f"{self.name} was launched before: make a new process")
        self.directory.mkdir(parents=True, exist_ok=True)
        self.records.mkdir(parents=True, exist_ok=True)
        read_end, self._pipe = os.pipe()
        owner = os.getpid()
        argv = [sys.executable, "-I", "-S", watchdog.__file__]
        argv += ["--pipe", str(read_end), "--mark", self._mark, "--records", str(self.records)]
        argv += ["--owner", str(owner), "--owner-started", str(watchdog.start_time(owner))]
        argv += ["--grace", str(self._grace_s)]
        for name, value in self._env.items():
            argv += ["--env", f"{name}={value}"]
        with self.log_path.open("ab") as log:
            self._log_start_bytes = log.tell()
            try:
                with _blocked() if self._shielded else contextlib.nullcontext():
                    self._popen = subprocess.Popen(
                        [*argv, "--", *self.argv],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(read_end,),
                        # Ctrl-C at the terminal signals the owner only, which then decides.
                        start_new_session=True,
                    )
            finally:
                os.close(read_end)
                if self._popen is None:
                    self._close_pipe()

    async def wait(self) -> int:
        """Wait for the program's end; returns its exit code (128 + n when signal n ended it)."""
        assert self._popen is not None, "launch it first"
        while self._popen.poll() is None:
            await asyncio.sleep(_POLL_S)
        self._close_pipe()
        code = self._popen.returncode
        return code if code >= 0 else 128 - code

    async def stop(self, grace_s: float | None = None) -> None:
        """End the program: SIGTERM (SIGINT if it is shielded), then SIGKILL of everything it started.

        Does nothing when it has ended.
        """
        popen = self._popen
        if popen is None:
            return
        try:
            grace_s = self._grace_s if grace_s is None else grace_s
            if popen.poll() is None and grace_s > 0:
                popen.send_signal(signal.SIGINT if self._shielded else signal.SIGTERM)
                await self.ended_within(grace_s)
            # The guard takes the end of the pipe for the end of this process and kills the tree.
            self._close_pipe()
            if not await self.ended_within(30.0):
                popen.kill()
        finally:
            self._close_pipe()
        # Ends the rest when guard and watchdog were killed themselves.
        await asyncio.to_thread(watchdog.kill_tree, 0, self._mark)
        await asyncio.to_thread(popen.wait)
        watchdog.remove_files(str(self.records), self._mark)

    async def ended_within(self, seconds: float) -> bool:
        """Whether the program ends within so many seconds."""
        assert self._popen is not None
        deadline = time.monotonic() + seconds
        while self._popen.poll() is None:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def log_tail(self, lines: int = 20) -> tuple[str, ...]:
        """The last lines that the program printed since its launch."""
        return log_tail(self.log_path, lines, self._log_start_bytes)

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
