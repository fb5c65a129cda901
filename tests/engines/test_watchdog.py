"""The leash: whoever is killed, nothing of the engine stays.

The engine here is a shell that starts a child, a grandchild in a session of its own, and an orphan.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle_dask.engines import leash

ENGINE = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "601"], start_new_session=True)
# An orphan in a session of its own: its parent is gone before it is.
subprocess.run([sys.executable, "-c",
    "import subprocess; subprocess.Popen(['sleep', '602'], start_new_session=True)"])
open(sys.argv[1], "w").close()
time.sleep(600)
"""

OWNER = """
import os, subprocess, sys, time
from heddle_dask.engines import leash
read_end, write_end = os.pipe()
guard = subprocess.Popen(
    [sys.executable, "-I", "-S", leash.__file__, "--pipe", str(read_end),
     "--owner", str(os.getpid()), "--owner-started", str(leash.start_time(os.getpid())),
     "--mark", sys.argv[1], "--records", sys.argv[2], "--grace", "1", "--env", "COLOR=red",
     "--", *sys.argv[3:]],
    pass_fds=[read_end], start_new_session=True)
print(guard.pid, flush=True)
os.close(read_end)
sys.exit(guard.wait())
"""

CEILING_S = 30.0


def _marked(mark: str) -> list[int]:
    return leash._tree(0, mark, 0, set())


def _until_none_is_left(mark: str) -> None:
    deadline = time.monotonic() + CEILING_S
    while _marked(mark):
        assert time.monotonic() < deadline, f"left over: {_marked(mark)}"
        time.sleep(0.02)


def _kill_what_may_have_ended(pid: int) -> None:
    """The death of the one before may have ended this one already, which is as good."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Leashed:
    """An owner process with a leashed engine."""

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
        return self.records / f"engine-{self.mark}.leash.json"

    @property
    def engine(self) -> int:
        return int(json.loads(self.record.read_text())["engine"])

    @property
    def leash(self) -> int:
        stat = leash._stat(self.engine)
        assert stat is not None
        return stat[1]

    def close(self) -> None:
        for pid in (self.owner.pid, self.guard):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.owner.wait()
        assert self.owner.stdout is not None
        self.owner.stdout.close()
        leash.kill_tree(0, self.mark)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + CEILING_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.02)


@pytest.fixture
def leashed(tmp_path: Path) -> Iterator[Leashed]:
    ready = tmp_path / "ready"
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    process = Leashed(tmp_path, mark, [sys.executable, "-c", ENGINE, str(ready)])
    try:
        _wait_for(ready)
        _wait_for(process.record)
        assert len(_marked(mark)) == 4
        yield process
    finally:
        process.close()


def test_sigkill_of_the_owner_leaves_nothing(leashed):
    leashed.owner.kill()
    _until_none_is_left(leashed.mark)


def test_sigkill_of_the_guard_leaves_nothing(leashed):
    os.kill(leashed.guard, signal.SIGKILL)
    _until_none_is_left(leashed.mark)


def test_sigkill_of_the_leash_leaves_nothing(leashed):
    os.kill(leashed.leash, signal.SIGKILL)
    _until_none_is_left(leashed.mark)
    assert leashed.owner.wait(CEILING_S) == 137


def test_sigkill_of_owner_and_leash_leaves_nothing(leashed):
    inner = leashed.leash
    leashed.owner.kill()
    _kill_what_may_have_ended(inner)
    _until_none_is_left(leashed.mark)


def test_sigkill_of_owner_and_guard_leaves_nothing(leashed):
    leashed.owner.kill()
    _kill_what_may_have_ended(leashed.guard)
    _until_none_is_left(leashed.mark)


def test_sigkill_of_all_three_ends_the_engine_and_the_next_start_ends_the_rest(leashed):
    engine, inner = leashed.engine, leashed.leash
    for pid in (leashed.owner.pid, leashed.guard, inner):
        os.kill(pid, signal.SIGSTOP)  # so that none can act on the death of another
    for pid in (inner, leashed.guard, leashed.owner.pid):
        os.kill(pid, signal.SIGKILL)
    leashed.owner.wait()
    deadline = time.monotonic() + CEILING_S
    while leash.start_time(engine):  # PDEATHSIG
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert leash.kill_stale(str(leashed.records)) == [engine]
    assert _marked(leashed.mark) == []
    assert not leashed.record.exists()


def test_a_living_owners_engine_is_not_stale(leashed):
    assert leash.kill_stale(str(leashed.records)) == []
    assert len(_marked(leashed.mark)) == 4
    assert leashed.record.exists()


def test_the_engines_end_ends_what_it_started_and_its_status_comes_through(leashed):
    os.kill(leashed.engine, signal.SIGKILL)
    _until_none_is_left(leashed.mark)
    assert leashed.owner.wait(CEILING_S) == 137
    assert not leashed.record.exists()


def test_sigterm_ends_all(leashed):
    os.kill(leashed.guard, signal.SIGTERM)
    assert leashed.owner.wait(CEILING_S) == 128 + signal.SIGTERM
    _until_none_is_left(leashed.mark)


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    ready = tmp_path / "ready"
    code = "import signal, sys, time; signal.signal(15, signal.SIG_IGN)\n"
    code += "open(sys.argv[1], 'w').close(); time.sleep(600)"
    process = Leashed(tmp_path, f"deaf-{os.getpid()}", [sys.executable, "-c", code, str(ready)])
    try:
        _wait_for(ready)
        os.kill(process.guard, signal.SIGTERM)
        assert process.owner.wait(CEILING_S) == 137
        _until_none_is_left(process.mark)
    finally:
        process.close()


def test_exit_code_and_environment_come_through(tmp_path):
    code = "import os, sys; sys.exit(7 if os.environ['COLOR'] == 'red' else 8)"
    process = Leashed(tmp_path, f"exit-{os.getpid()}", [sys.executable, "-c", code])
    try:
        assert process.owner.wait(CEILING_S) == 7
    finally:
        process.close()


def test_an_engine_that_does_not_exist_ends_at_once(tmp_path):
    process = Leashed(tmp_path, f"none-{os.getpid()}", ["/no/such/engine"])
    try:
        assert process.owner.wait(CEILING_S) == 127
    finally:
        process.close()


def test_broken_and_foreign_records_do_no_harm(tmp_path):
    (tmp_path / "engine-a.leash.json").write_text("{")
    (tmp_path / "notes.json").write_text("{}")
    # Another boot: every pid in it means somebody else now.
    me = {"engine": os.getpid(), "engine_started": leash.start_time(os.getpid()), "mark": "x"}
    foreign = {**me, "owner": 1, "owner_started": -1, "boot_id": "another"}
    (tmp_path / "engine-b.leash.json").write_text(json.dumps(foreign))
    assert leash.kill_stale(str(tmp_path)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.json"]
    assert leash.kill_stale(str(tmp_path / "absent")) == []


def test_the_leash_imports_only_the_standard_library():
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print(*sorted(sys.modules))"
    argv = [sys.executable, "-I", "-S", "-c", code, leash.__file__]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    tops = {name.partition(".")[0] for name in loaded}
    assert tops <= set(sys.stdlib_module_names) | {"__main__", "__mp_main__"}
    assert not {"asyncio", "subprocess", "multiprocessing"} & tops
