"""The watchdog: whichever process is killed, no process of the engine is left.

The engine here starts a child, a grandchild in a session of its own, and an orphan, and has a semaphore and shared
memory, for which Python starts a process too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heddle_dask.engines import watchdog
from heddle_dask.engines.supervised_process import kill_stale
from heddle_dask.live.clusters.owned_directory import OwnedDirectory

ENGINE = """
import multiprocessing, os, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
lock, memory = multiprocessing.get_context("spawn").Lock(), SharedMemory(create=True, size=10)
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "601"], start_new_session=True)
# An orphan in a session of its own: its parent is gone before it is.
subprocess.run([sys.executable, "-c",
    "import subprocess; subprocess.Popen(['sleep', '602'], start_new_session=True)"])
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"sem.{lock._semlock.name[1:]} {memory.name}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""

OWNER = """
import os, subprocess, sys, time
from heddle_dask.engines import watchdog
read_end, write_end = os.pipe()
guard = subprocess.Popen(
    [sys.executable, "-I", "-S", watchdog.__file__, "--pipe", str(read_end),
     "--owner", str(os.getpid()), "--owner-started", str(watchdog.start_time(os.getpid())),
     "--mark", sys.argv[1], "--records", sys.argv[2], "--grace", "1", "--env", "COLOR=red",
     "--", *sys.argv[3:]],
    pass_fds=[read_end], start_new_session=True)
print(guard.pid, flush=True)
os.close(read_end)
sys.exit(guard.wait())
"""

CEILING_S = 30.0


def _marked(mark: str) -> list[int]:
    return watchdog._tree(0, mark, 0, set())


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CEILING_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _until_none_is_left(mark: str) -> None:
    _until(lambda: not _marked(mark))


def _kill_what_may_have_ended(pid: int) -> None:
    """The death of the one before may have ended this one already, which is as good."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Supervised:
    """An owner process with a supervised engine."""

    def __init__(self, directory: Path, mark: str, engine_argv: list[str]) -> None:
        self.mark = mark
        self.records = directory
        self.owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, mark, str(directory), *engine_argv],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.owner.stdout is not None
        self.guard = int(self.owner.stdout.readline())

    @property
    def record(self) -> Path:
        return self.records / f"engine-{self.mark}.watchdog.json"

    @property
    def engine(self) -> int:
        return int(json.loads(self.record.read_text())["engine"])

    @property
    def watchdog(self) -> int:
        stat = watchdog._stat(self.engine)
        assert stat is not None
        return stat[1]

    def close(self) -> None:
        for pid in (self.owner.pid, self.guard):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.owner.wait()
        assert self.owner.stdout is not None
        self.owner.stdout.close()
        watchdog.kill_tree(0, self.mark)


def _wait_for(path: Path) -> None:
    _until(path.exists)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    ready = tmp_path / "ready"
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    process = Supervised(tmp_path, mark, [sys.executable, "-c", ENGINE, str(ready)])
    try:
        _wait_for(ready)
        _wait_for(process.record)
        assert len(_marked(mark)) == 5
        shared = [Path("/dev/shm", name) for name in ready.read_text().split()]
        assert all(path.exists() for path in shared)
        yield process
    finally:
        process.close()
    assert not any(path.exists() for path in shared)


def test_sigkill_of_the_owner_leaves_nothing(supervised):
    supervised.owner.kill()
    _until_none_is_left(supervised.mark)


def test_sigkill_of_the_guard_leaves_nothing(supervised):
    os.kill(supervised.guard, signal.SIGKILL)
    _until_none_is_left(supervised.mark)


def test_sigkill_of_the_watchdog_leaves_nothing(supervised):
    os.kill(supervised.watchdog, signal.SIGKILL)
    _until_none_is_left(supervised.mark)
    assert supervised.owner.wait(CEILING_S) == 137


def test_sigkill_of_owner_and_watchdog_leaves_nothing(supervised):
    inner = supervised.watchdog
    supervised.owner.kill()
    _kill_what_may_have_ended(inner)
    _until_none_is_left(supervised.mark)


def test_sigkill_of_owner_and_guard_leaves_nothing(supervised):
    supervised.owner.kill()
    _kill_what_may_have_ended(supervised.guard)
    _until_none_is_left(supervised.mark)


def test_sigkill_of_all_three_ends_the_engine_and_the_next_start_ends_the_rest(supervised):
    engine, inner = supervised.engine, supervised.watchdog
    for pid in (supervised.owner.pid, supervised.guard, inner):
        os.kill(pid, signal.SIGSTOP)  # so that none can act on the death of another
    for pid in (inner, supervised.guard, supervised.owner.pid):
        os.kill(pid, signal.SIGKILL)
    supervised.owner.wait()
    deadline = time.monotonic() + CEILING_S
    while watchdog.start_time(engine):  # PDEATHSIG
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert kill_stale(str(supervised.records)) == [engine]
    assert _marked(supervised.mark) == []
    assert not supervised.record.exists()


def test_what_was_killed_all_at_once_leaves_shared_memory_until_the_next_start(supervised):
    """As a batch system does it: with the trackers of Python, which would clean up behind the others."""
    _until(lambda: len(json.loads(supervised.record.read_text())["shared"]) == 2)
    processes = [supervised.owner.pid, supervised.guard, supervised.watchdog, *_marked(supervised.mark)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes:
            os.kill(pid, number)
    _until_none_is_left(supervised.mark)
    left = [Path("/dev/shm", name) for name in json.loads(supervised.record.read_text())["shared"]]
    assert len(left) == 2 and all(path.exists() for path in left)
    # As the scratch directory of a killed job with a dead owner: the next job begins.
    (supervised.records / ".lock").touch()
    with OwnedDirectory(supervised.records.name, supervised.records.parent):
        assert not any(path.exists() for path in left) and not supervised.records.exists()


def test_a_living_owners_engine_is_not_stale(supervised):
    assert kill_stale(str(supervised.records)) == []
    assert len(_marked(supervised.mark)) == 5
    assert supervised.record.exists()


def test_the_engines_end_ends_what_it_started_and_its_status_comes_through(supervised):
    os.kill(supervised.engine, signal.SIGKILL)
    _until_none_is_left(supervised.mark)
    assert supervised.owner.wait(CEILING_S) == 137
    assert not supervised.record.exists()


def test_sigterm_ends_all(supervised):
    os.kill(supervised.guard, signal.SIGTERM)
    assert supervised.owner.wait(CEILING_S) == 128 + signal.SIGTERM
    _until_none_is_left(supervised.mark)


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    ready = tmp_path / "ready"
    code = "import signal, sys, time; signal.signal(15, signal.SIG_IGN)\n"
    code += "open(sys.argv[1], 'w').close(); time.sleep(600)"
    process = Supervised(tmp_path, f"deaf-{os.getpid()}", [sys.executable, "-c", code, str(ready)])
    try:
        _wait_for(ready)
        os.kill(process.guard, signal.SIGTERM)
        assert process.owner.wait(CEILING_S) == 137
        _until_none_is_left(process.mark)
    finally:
        process.close()


SIGNAL_AFTER_FORK = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import watchdog
function = getattr(os, sys.argv[2])
def signalled():
    result = function()
    if result != 0 or sys.argv[2] == "setsid":  # the parent of a fork, or the engine before its exec
        os.kill(os.getpid(), signal.SIGTERM)
    return result
setattr(os, sys.argv[2], signalled)
read_end, write_end = os.pipe()
owner = os.getppid()
sys.exit(watchdog.main([
    "--pipe", str(read_end), "--owner", str(owner), "--owner-started", str(watchdog.start_time(owner)),
    "--mark", sys.argv[3], "--records", sys.argv[4], "--", "sh", "-c", "sleep 0.5; exit 3"]))
"""


@pytest.mark.parametrize("after", ["fork", "setsid"])
def test_a_signal_between_fork_and_exec_is_not_lost(tmp_path, after):
    argv = [str(Path(watchdog.__file__).parent), after, "early-signal", str(tmp_path)]
    ended = subprocess.run([sys.executable, "-c", SIGNAL_AFTER_FORK, *argv], timeout=CEILING_S)
    assert ended.returncode == 128 + signal.SIGTERM
    assert not _marked("early-signal")


def test_exit_code_and_environment_come_through(tmp_path):
    code = "import os, sys; sys.exit(7 if os.environ['COLOR'] == 'red' else 8)"
    process = Supervised(tmp_path, f"exit-{os.getpid()}", [sys.executable, "-c", code])
    try:
        assert process.owner.wait(CEILING_S) == 7
    finally:
        process.close()


def test_an_engine_that_does_not_exist_ends_at_once(tmp_path):
    process = Supervised(tmp_path, f"none-{os.getpid()}", ["/no/such/engine"])
    try:
        assert process.owner.wait(CEILING_S) == 127
    finally:
        process.close()


def test_broken_and_foreign_records_do_no_harm(tmp_path):
    (tmp_path / "engine-a.watchdog.json").write_text("{")
    (tmp_path / "notes.json").write_text("{}")
    # Another boot: every pid in it names another process now.
    me = {"engine": os.getpid(), "engine_started": watchdog.start_time(os.getpid()), "mark": "x"}
    old = {**me, "owner": 1, "owner_started": -1, "boot_id": "another", "host": os.uname().nodename}
    (tmp_path / "engine-x.watchdog.json").write_text(json.dumps(old))
    # Another machine, with the same directory: its engine may be running.
    there = {**old, "mark": "y", "host": f"not-{os.uname().nodename}"}
    (tmp_path / "engine-y.watchdog.json").write_text(json.dumps(there))
    assert kill_stale(str(tmp_path)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine-y.watchdog.json", "notes.json"]
    assert kill_stale(str(tmp_path / "absent")) == []


def test_the_watchdog_imports_only_the_standard_library():
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*sorted(sys.modules))"
    argv = [sys.executable, "-I", "-S", "-c", code, watchdog.__file__]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    tops = {name.partition(".")[0] for name in loaded}
    assert tops <= set(sys.stdlib_module_names) | {"__main__", "__mp_main__"}
    assert not {"asyncio", "subprocess", "multiprocessing"} & tops


def _planted(directory: Path, victim: int, mark: str) -> Path:
    """A record of a dead owner that names a living process."""
    record = {
        "engine": victim,
        "engine_started": watchdog.start_time(victim),
        "mark": mark,
        "owner": 1,
        "owner_started": -1,
        "boot_id": watchdog.boot_id(),
        "host": os.uname().nodename,
    }
    path = directory / watchdog.record_name(mark)
    path.write_text(json.dumps(record))
    return path


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """An innocent process that leads a session of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_planted_record_kills_no_process_without_the_mark(tmp_path, victim):
    path = _planted(tmp_path, victim.pid, "planted")
    assert kill_stale(str(tmp_path)) == []
    assert victim.poll() is None
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_record_of_another_user_or_behind_a_link_is_ignored(tmp_path):
    mark = f"foreign-{os.getpid()}"
    marked = subprocess.Popen(["sleep", "600"], env={watchdog.MARK: mark})
    try:
        # The kernel shows a new program's environment a moment after its start is reported.
        _until(lambda: watchdog.carries_mark(marked.pid, mark))
        path = _planted(tmp_path, marked.pid, mark)
        os.chown(path, 12345, 12345)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (tmp_path / watchdog.record_name("link")).symlink_to(_planted(elsewhere, marked.pid, mark))
        assert kill_stale(str(tmp_path)) == []
        assert marked.poll() is None
        os.chown(path, os.geteuid(), os.getegid())
        assert kill_stale(str(tmp_path)) == [marked.pid]
        assert marked.wait(CEILING_S) == -signal.SIGKILL
    finally:
        marked.kill()
        marked.wait()
