"""``heddle rollout`` as its users run it: a process of its own, a real cluster, emulated engines, signals."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from worlds.live_world import descendants
from worlds.shared_cluster import shared_cluster_sync

from heddle_dask.cli.main import heddle as heddle_command
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.files.recorded_sessions import control_lines, recorded_sessions
from heddle_dask.records.reader import RunReader
from heddle_dask.records.trajectory import TrajectoryRecord

pytestmark = pytest.mark.cluster

HANG_S = 120.0
MARK = "HEDDLE_TEST_MARK"
AGENTS = '''
import asyncio

from heddle_dask.environments.base import Task


def tasks(count, seed):
    return [Task(f"t{number}", f"Task {number}.") for number in range(count)]


async def tool(text):
    await asyncio.sleep(0.02)
    return f"tool: {text}"


async def solve(task, ctx):
    ctx.append("user", task.prompt)
    for step in range(3):
        await ctx.generate(max_tokens=16, ignore_eos=True)
        ctx.append("tool", await ctx.call(tool, step))
    if task.task_id == "t1":
        raise RuntimeError("this agent is broken")
    return 1.0


async def slow(task, ctx):
    """The first tasks end soon, the others hardly ever."""
    ctx.append("user", task.prompt)
    steps = 1 if int(task.task_id[1:]) < 2 else STEPS
    for step in range(steps):
        await ctx.generate(max_tokens=16, ignore_eos=True)
        ctx.append("tool", await ctx.call(tool, step))
    return 1.0


STEPS = 60
'''


class Heddle:
    """Runs the command line in one directory, with a mark that all its processes inherit."""

    def __init__(self, directory: Path, model: str) -> None:
        self.directory = directory
        self.model = model
        self.mark = uuid.uuid4().hex
        self.running: list[subprocess.Popen[str]] = []

    def start(self, *arguments: object, env: str = "agents:solve", out: str = "run.zarr") -> subprocess.Popen[str]:
        given = ["--engine", "emulated", "--model", self.model, "--env", env, "--out", out, "--json"]
        given += ["--no-dashboard", "--tool-cpus", "4", *map(str, arguments)]
        process = subprocess.Popen(
            [sys.executable, "-c", "from heddle_dask.cli.main import main; main()", "rollout", *given],
            cwd=self.directory,
            env={**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def run(self, *arguments: object, code: int = 0, **options: str) -> dict[str, Any]:
        """To its end; returns the JSON object of the last line of stdout."""
        return result_of(self.start(*arguments, **options), code)

    def path(self, name: str = "run.zarr") -> Path:
        return self.directory / name

    def processes(self) -> list[int]:
        """Living processes that inherited the mark, the command itself included."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it has just ended
            if f"{MARK}={self.mark}".encode() in environment and state not in "ZX":
                found.append(int(entry.name))
        return found

    def pid_of(self, word: str) -> int:
        """The program with this word in its command line, and not a guard that starts it."""
        lines = {pid: (Path("/proc") / str(pid) / "cmdline").read_text() for pid in self.processes()}
        for pid, line in lines.items():
            if word in line and "--owner" not in line:
                return pid
        raise AssertionError(f"no process of {word}: {lines}")

    def shared_memory(self) -> list[Path]:
        """Semaphores and shared memory that its processes have."""
        maps = [line for pid in self.processes() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        return [path for path in {Path(line.split()[-1]) for line in maps if " /dev/shm/" in line} if path.exists()]

    def assert_nothing_left(self) -> None:
        until(lambda: not self.processes(), "processes are left")


@pytest.fixture
def heddle(tmp_path: Path, model_dir: str) -> Iterator[Heddle]:
    (tmp_path / "agents.py").write_text(AGENTS)
    made = Heddle(tmp_path, model_dir)
    yield made
    for process in made.running:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=HANG_S)
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def open_cluster() -> Iterator[str]:
    """The address of somebody else's cluster, which tests share."""
    with shared_cluster_sync(1, security=False) as client:
        assert client.scheduler is not None
        yield client.scheduler.address


def result_of(process: subprocess.Popen[str], code: int, lines: list[str] | None = None) -> dict[str, Any]:
    """The JSON object of the last line of stdout; `lines` receives those of stderr."""
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == code, err
    assert "Traceback" not in err, err
    if lines is not None:
        lines += err.splitlines()
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def until(condition: Callable[[], Any], failure: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.05)


def finished(path: Path) -> int:
    """Trajectories that the journal or the store holds, 0 while there is no run."""
    try:
        return len(StoredRun(path))
    except BadInput:
        return 0  # not there, or being made


def by_id(path: Path) -> dict[str, TrajectoryRecord]:
    return {record.trajectory_id: record for record in StoredRun(path)}


def sessions_that_replay(path: Path) -> list[bool]:
    """For each session of the run, whether a fresh controller commands the same."""
    sessions = recorded_sessions(path)
    assert all(session.events and not session.missing for session in sessions)
    return [session.mismatch is None for session in sessions]


def assert_equal(one: TrajectoryRecord, other: TrajectoryRecord) -> None:
    assert one.branches == other.branches and one.status == other.status and one.reward == other.reward


def logs_of(heddle: Heddle) -> list[str]:
    root = heddle.directory / "run.logs"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.log"))


def test_rollout_stores_and_reports_and_a_broken_agent_is_data(heddle):
    # Packages of the user with the names of ours: nothing of ours is looked for by these names.
    for name in ("workers", "pipelines"):
        (heddle.directory / name).mkdir()
        (heddle.directory / name / "__init__.py").write_text("")
    result = heddle.run("--tasks", 4, "--samples", 2, "--engines", 2)
    assert (result["trajectories"], result["completed"], result["failed"]) == (8, 6, 2)
    assert result["steps"] == 24 and result["actions"] == 24 and result["tokens"] == 24 * 16
    assert result["reward_mean"] == 1.0 and 0 < result["bound_s"] <= result["makespan_s"]
    assert result["out"] == "run.zarr"
    reader = RunReader(heddle.path())
    assert reader.summary().trajectories == 8 and reader.metadata["tasks"] == 4
    broken = [record for record in reader if record.status == "failed"]
    assert {record.task_id for record in broken} == {"t1"}
    for record in broken:
        assert record.cause == "agent" and record.reward is None and len(record.steps) == 3
        assert "RuntimeError: this agent is broken" in record.detail and "agents.py" in record.detail
    (cause,) = result["causes"]
    assert (cause["status"], cause["cause"], cause["count"]) == ("failed", "agent", 2)
    assert cause["first_message"] == "RuntimeError: this agent is broken"
    assert cause["first_trajectory"] in {"t1/0", "t1/1"}
    assert set(logs_of(heddle)) == {
        *(f"session-1/rollout-{i}/host-1/engine-1/engine.log" for i in range(2)),
        *(f"session-1/{name}.log" for name in ("rollout-0", "rollout-1", "scheduler", "tool-0")),
    }
    heddle.assert_nothing_left()

    again = heddle.start("--tasks", 4)
    out, err = again.communicate(timeout=HANG_S)
    assert (again.returncode, out, len(err.splitlines())) == (2, "", 1) and "run.zarr exists" in err

    more = heddle.run("--tasks", 2, "--samples", 1, "--append")
    assert more["trajectories"] == 2
    assert RunReader(heddle.path()).summary().trajectories == 10
    assert sessions_that_replay(heddle.path()) == [True, True]
    assert {name.partition("/")[0] for name in logs_of(heddle)} == {"session-1", "session-2"}

    (heddle.directory / "agents.py").write_text(AGENTS.replace('== "t1"', '!= "never"'))
    process = heddle.start("--tasks", 1, "--samples", 2, "--overwrite")
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1 and json.loads(out.splitlines()[-1])["failed"] == 2
    assert "Traceback" not in err and "failed by agent" in err
    assert "heddle: all 2 trajectories failed; " in err and "this agent is broken" in err.splitlines()[-1]
    assert {name.partition("/")[0] for name in logs_of(heddle)} == {"session-3"}
    assert RunReader(heddle.path()).summary().trajectories == 2


def interrupted(heddle: Heddle, number: int, code: int, *arguments: object) -> None:
    """A signal while a rollout runs keeps what is finished and ends every process of it."""
    process = heddle.start("--tasks", 6, "--samples", 1, *arguments, env="agents:slow")
    until(lambda: finished(heddle.path()) >= 2, "nothing finishes")
    process.send_signal(number)
    result = result_of(process, code)
    assert not heddle.processes()
    assert (result["trajectories"], result["completed"], result["aborted"]) == (6, 2, 4)
    records = by_id(heddle.path())
    # What a batch system has ended is left to the run that resumes it.
    stored = {"aborted": 4, "completed": 2} if number == signal.SIGINT else {"completed": 2}
    assert RunReader(heddle.path()).summary().by_status == stored
    assert {name for name, record in records.items() if record.status == "completed"} == {"t0/0", "t1/0"}
    assert all(record.cause == "user" for record in records.values() if record.status == "aborted")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_keeps_what_is_finished_and_ends_every_process(heddle, number, code):
    interrupted(heddle, number, code)


def test_first_signal_of_a_batch_system_on_somebody_elses_cluster(heddle, open_cluster):
    interrupted(heddle, signal.SIGUSR1, 75, "--scheduler", open_cluster)


def test_second_ctrl_c_ends_at_once_and_leaves_no_process(heddle):
    process = heddle.start("--tasks", 6, "--samples", 1, env="agents:slow")
    until(lambda: finished(heddle.path()) >= 2, "nothing finishes")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    for line in process.stderr:
        if "stopping" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    heddle.assert_nothing_left()
    assert finished(heddle.path()) >= 2


@pytest.mark.parametrize("moment", ["starting a local cluster", "engines ready"])
def test_ctrl_c_during_the_start_ends_every_process_and_leaves_no_empty_run(heddle, moment):
    # Most of its tasks hardly ever end: the run is not over before the signal.
    process = heddle.start("--tasks", 6, "--engines", 2, env="agents:slow")
    assert process.stderr is not None
    for line in process.stderr:
        if moment in line:
            break
    process.send_signal(signal.SIGINT)
    result = result_of(process, 130)
    assert not heddle.processes()
    if result["trajectories"] == 0:
        assert result["out"] is None and not heddle.path().exists()


def test_a_rollout_goes_on_after_the_death_of_its_driver_and_of_its_scheduler(heddle, open_cluster):
    """Driver and scheduler die in one session each; the third session, on another cluster, completes the run."""
    (heddle.directory / "agents.py").write_text(AGENTS.replace("STEPS = 60", "STEPS = 30"))
    process = heddle.start("--tasks", 6, "--samples", 1, env="agents:slow")
    until(lambda: finished(heddle.path()) >= 2, "nothing finishes")
    shared = heddle.shared_memory()
    process.kill()
    process.communicate(timeout=HANG_S)
    heddle.assert_nothing_left()
    assert shared and not any(path.exists() for path in shared)
    assert "session-1/scheduler.log" in logs_of(heddle)
    kept = [by_id(heddle.path())]
    assert 2 <= len(kept[0]) < 6

    # One more attempt at each task, too.
    arguments = ("--tasks", 6, "--samples", 2, "--resume")
    its_scheduler_dies(heddle, heddle.start(*arguments, env="agents:slow"))
    kept.append(by_id(heddle.path()))
    assert 4 <= len(kept[1]) < 12

    arguments += ("--scheduler", open_cluster)
    result = heddle.run(*arguments, env="agents:slow")
    assert (result["trajectories"], result["completed"]) == (12, 12)
    after = by_id(heddle.path())
    assert set(after) == {f"t{i}/{sample}" for i in range(6) for sample in range(2)}
    assert RunReader(heddle.path()).metadata["batch_facts"][-1]["samples"] == 2
    for name, record in [*kept[0].items(), *kept[1].items()]:
        assert_equal(record, after[name])
    assert all(len(after[f"t{i}/{sample}"].steps) == 30 for i in range(2, 6) for sample in range(2))
    assert sessions_that_replay(heddle.path()) == [True, True, True], "those of the killed, too"
    sessions: list[list[Any]] = []
    for facts, lines in control_lines(heddle.path()):
        if facts is not None:
            sessions.append([])
        sessions[-1] += [event[2] for event, _ in lines if event[0] == "TrajectorySubmitted"]
    assert {spec[7] for spec in sessions[0]} == {0}
    for resumed, before in zip(sessions[1:], kept, strict=True):
        assert {spec[0] for spec in resumed} == set(after) - set(before)
        assert any(spec[7] > 0 for spec in resumed), "what the journal held of those that had begun"
    shown = CliRunner().invoke(heddle_command, ["show", str(heddle.path()), "--json"])
    whole = json.loads(shown.stdout.splitlines()[-1])
    assert whole["makespan_s"] > result["makespan_s"] and whole["tokens_per_s"] > 0, "the sum of all sessions"
    assert re.search(r"makespan +[\d.]+ s in 3 sessions", shown.stderr)
    again = heddle.start(*arguments, env="agents:slow")
    assert result_of(again, 0, said := [])["completed"] == 12
    assert "every trajectory of run.zarr has ended: nothing is left to do" in said[0], "no cluster is started"


def its_scheduler_dies(heddle: Heddle, process: subprocess.Popen[str]) -> None:
    """One line with its log, and what is finished is kept; before it a killed engine is told with the place of logs."""
    until(lambda: finished(heddle.path()) >= 4, "nothing finishes")
    os.kill(heddle.pid_of("heddle_dask.engines.emulated"), signal.SIGKILL)
    assert process.stderr is not None
    lost = next(line for line in process.stderr if "is lost" in line)
    assert "(logs: run.logs/session-2)" in lost
    os.kill(heddle.pid_of("dask scheduler ["), signal.SIGKILL)
    result = result_of(process, 1, err := [])
    assert result["completed"] >= 4 and result["lost"] == 12 - result["completed"]
    assert err[-1].startswith("heddle: the scheduler does not answer: its connection has closed")
    assert "(log: run.logs/session-2/scheduler.log" in err[-1]
    assert err[-1].endswith("what has finished is stored: give the same command with --out run.zarr --resume")
    assert not any("Traceback" in line for line in err)
    heddle.assert_nothing_left()


def test_a_full_disk_is_one_line_and_the_run_can_be_resumed(heddle, open_cluster):
    """The journal may not grow beyond a limit, which the long trajectories reach and the short ones do not."""
    arguments = ("--scheduler", open_cluster, "--tasks", 6, "--samples", 1)
    (heddle.directory / "agents.py").write_text(AGENTS.replace("STEPS = 60", "STEPS = 30"))
    process = heddle.start(*arguments, env="agents:slow")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (80_000, 80_000))
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1 and out == ""
    assert "Traceback" not in err, err
    last = err.splitlines()[-1]
    assert last.startswith("heddle: cannot write run.journal: File too large: ") and "--resume" in last
    heddle.assert_nothing_left()
    before = by_id(heddle.path())
    assert 2 <= len(before) < 6
    result = heddle.run(*arguments, "--resume", env="agents:slow")
    assert (result["trajectories"], result["completed"]) == (6, 6)
    after = by_id(heddle.path())
    for name, record in before.items():
        assert_equal(record, after[name])


def test_engines_of_a_killed_driver_on_somebody_elses_cluster_are_taken_over_or_end(heddle, open_cluster):
    def engines() -> list[psutil.Process]:
        return descendants("heddle_dask.engines.emulated")

    (heddle.directory / "agents.py").write_text(AGENTS.replace("STEPS = 60", "STEPS = 20"))
    arguments = ("--scheduler", open_cluster, "--tasks", 4, "--samples", 1)

    def killed(out: str, *more: object) -> list[psutil.Process]:
        process = heddle.start(*arguments, *more, env="agents:slow", out=out)
        until(lambda: finished(heddle.path(out)) >= 2, "nothing finishes")
        running = engines()
        process.kill()
        process.communicate(timeout=HANG_S)
        return running

    assert killed("run.zarr") and engines()
    result = heddle.run(*arguments, "--resume", env="agents:slow")
    assert (result["trajectories"], result["completed"]) == (4, 4)
    until(lambda: not engines(), "the engines outlive the run that took them over")

    assert killed("other.zarr", "--orphan-timeout", 0.5)
    until(lambda: not engines(), "the engines outlive their driver")


def test_engine_that_does_not_start_is_one_line_with_the_end_of_its_log(heddle):
    # No KV cache of the emulated engine holds so long a context.
    process = heddle.start("--tasks", 1, "--max-context-tokens", 10**9)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 2 and out == ""
    last = err.splitlines()[-1]
    assert "engine" in last and "max_model_len" in last
    assert "(logs: run.logs/session-1)" in last and "session-1/scheduler.log" in logs_of(heddle)
    assert not heddle.path().exists()
    heddle.assert_nothing_left()


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_that_does_not_start_is_one_line_with_the_end_of_its_log(heddle):
    broken = heddle.directory / "broken"
    shutil.copytree(heddle.model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    process = heddle.start("--engine", "vllm", "--model", broken, "--tasks", 1)
    out, err = process.communicate(timeout=2 * HANG_S)
    assert process.returncode == 2 and out == ""
    last = err.splitlines()[-1]
    assert "vllm engine" in last and "last lines of its log: " in last
    assert not heddle.path().exists()
    heddle.assert_nothing_left()


def test_cluster_without_a_worker_for_the_model_is_refused_after_a_bounded_wait(heddle):
    with LocalRolloutCluster(engines=0, dashboard=False, security=False) as cluster:
        process = heddle.start("--scheduler", cluster.scheduler_address, "--worker-timeout", 1)
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 2 and out == ""
    assert "ENGINE=1" in err.splitlines()[-1]
    assert not heddle.path().exists()


SCHEDULER_WITHOUT_HEDDLE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "heddle_dask":
            raise ModuleNotFoundError("No module named 'heddle_dask'", name="heddle_dask")

sys.meta_path.insert(0, Hidden())
from distributed.cli.dask_scheduler import main
main(["--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0", "--no-dashboard",
      "--scheduler-file", "scheduler.json"])
"""


def test_a_cluster_without_this_package_is_refused_in_one_line(heddle):
    scheduler = subprocess.Popen([sys.executable, "-c", SCHEDULER_WITHOUT_HEDDLE], cwd=heddle.directory)
    try:
        file = heddle.directory / "scheduler.json"
        until(lambda: file.exists() and file.read_text().endswith("}"), "no scheduler")
        process = heddle.start("--scheduler", json.loads(file.read_text())["address"], "--tasks", 1)
        out, err = process.communicate(timeout=HANG_S)
    finally:
        scheduler.kill()
        scheduler.wait()
    assert process.returncode == 2 and out == "" and "Traceback" not in err
    assert "cannot load heddle_dask (No module named 'heddle_dask')" in err.splitlines()[-1]


def test_rollout_on_somebody_elses_cluster_leaves_it_as_it_was(heddle, monkeypatch):
    with LocalRolloutCluster(engines=2, dashboard=False) as cluster:
        refused = heddle.start("--scheduler", cluster.scheduler_address)
        out, err = refused.communicate(timeout=HANG_S)
        assert (refused.returncode, out, len(err.splitlines())) == (2, "", 1)
        assert "needs TLS credentials: give --tls-ca-file" in err

        (place,) = cluster.directory.glob("tls-*")
        certificate, key = place / "certificate.pem", place / "key.pem"
        options = ["--tls-ca-file", certificate, "--tls-cert", certificate, "--tls-key", key]
        config = {"CA_FILE": certificate, "CLIENT__CERT": certificate, "CLIENT__KEY": key}
        for given in (options, []):
            if not given:
                for name, path in config.items():
                    monkeypatch.setenv(f"DASK_DISTRIBUTED__COMM__TLS__{name}", str(path))
            result = heddle.run("--scheduler", cluster.scheduler_address, *given, "--tasks", 2, "--overwrite")
            assert (result["trajectories"], result["failed"]) == (8, 4)
            heddle.assert_nothing_left()
