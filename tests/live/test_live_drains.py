"""Jobs that end during a rollout: what their workers hold goes elsewhere first. On a real cluster, emulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client
from worlds.live_agents import RecordingWorker, ToolAgent
from worlds.live_world import check_against_engine, control_lines, emulated, run, until

from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.session import open_session
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import Strategy, strategies_of_run

pytestmark = pytest.mark.cluster

LAUNCHER = Path(__file__).parents[2] / "workers" / "job.py"
Job = subprocess.Popen[str]


def started_job(made: LocalRolloutCluster, directory: Path, number: int, options: Sequence[str]) -> Job:
    command = [sys.executable, str(LAUNCHER), made.scheduler_address, "--name", f"job-{number}"]
    command += ["--scratch", str(directory / "scratch"), "--logs", str(directory / "logs")]
    assert made.credentials is not None
    command += [*made.credentials.options, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@contextlib.asynccontextmanager
async def jobs(directory: Path, *options: Sequence[str]) -> AsyncIterator[tuple[Client, list[Job]]]:
    """A scheduler, and a job with a worker for each sequence of options. At the end all jobs have ended in order."""
    running: list[Job] = []
    async with (
        LocalRolloutCluster(0, tool_workers=0, dashboard=False, asynchronous=True, directory=directory / "c") as made,
        Client(made, asynchronous=True) as client,
    ):
        assert made.credentials is not None
        try:
            for number, more in enumerate(options):
                running.append(started_job(made, directory, number, more))
            await client.wait_for_workers(len(options))
            yield client, running
        finally:
            for job in running:
                job.send_signal(signal.SIGTERM)
            codes = [await asyncio.to_thread(job.wait) for job in running]
            for job in running:
                assert job.stdout is not None
                job.stdout.close()
        assert codes == [0] * len(running)
        assert list((directory / "scratch").iterdir()) == []
    logs = {path.name: path.read_text() for path in directory.rglob("*.log")}
    assert [name for name, text in logs.items() if "KeyError" in text] == [], "the scheduler does not know it any more"


def below(job: Job) -> list[psutil.Process]:
    """All processes that a job has started."""
    return psutil.Process(job.pid).children(recursive=True)


def check_drained(out: Path, seen: Path, trajectories: int) -> Counter[str]:
    """All trajectories are whole, nothing was lost, and the journal replays; the kinds of events and commands."""
    reader = RunReader(out)
    assert reader.summary().by_status == {"completed": trajectories}
    check_against_engine(list(reader), seen)
    lines = control_lines(out)
    kinds = Counter(event[0] for event, _ in lines)
    kinds += Counter(command[0] for _, commands in lines for command in commands)
    assert kinds["GiveUpStep"] == 0
    # The context of a step that goes on elsewhere may have to come from the driver again.
    assert {event[4] for event, _ in lines if event[0] == "StepFailed"} <= {"context-missing"}
    orders = [
        command[0] if command is not None else event[0] for event, commands in lines for command in (None, *commands)
    ]
    assert orders.index("ReleaseEngine") < orders.index("EngineLost"), "it ended before it was empty"
    assert list(replay(Controller(strategies_of_run(reader.metadata)), lines)) == []
    return kinds


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What goes to the engines and what they sample is written there."""
    path = tmp_path / "seen.jsonl"
    monkeypatch.setattr(open_session, "RolloutWorker", lambda spec, watch: RecordingWorker(spec, str(path)))
    return path


def test_a_job_that_is_told_of_its_end_gives_its_work_to_the_others(model_dir: str, seen: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    rollout_job, tool_job = ("--drain-s", "40"), ("--role", "tool", "--cpus", "4", "--drain-s", "40")

    async def body() -> None:
        async with jobs(tmp_path, rollout_job, rollout_job, tool_job, tool_job) as (client, running):
            rollout = Rollout(
                client,
                env=ToolAgent(steps=8, tokens=50, tool_s=0.15),
                model=model_dir,
                engines=emulated(model_dir, seconds_per_token=0.006, slots=2, steps_ahead=1, kv_transfer=True),
                strategy="heddle",
                samples=2,
                seed=5,
                out=out,
            )
            batch = asyncio.ensure_future(rollout.run(8))
            await until(lambda: rollout.progress()["tokens"] > 300)
            ending = (running[0], running[2])
            started = [process for job in ending for process in below(job)]
            for process in started:
                process.send_signal(signal.SIGTERM)  # as a batch system may send it to every process of a job
            for job in ending:
                job.send_signal(signal.SIGUSR1)
            await until(lambda: all(job.poll() is not None for job in ending))
            assert not any(process.is_running() for process in started)
            assert (await batch).counts == {"completed": 16}

    run(body())
    kinds = check_drained(out, seen, 16)
    assert kinds["EngineDraining"] == kinds["HostDraining"] == kinds["ReleaseHost"] == 1
    moves = [command for _, commands in control_lines(out) for command in commands if command[0] == "MoveContext"]
    left = [(kind, source) for _, _, source, _, kind in moves if source.startswith("job-0/")]
    assert left and {kind for kind, _ in left} == {"transfer"}, "contexts moved with their KV caches"


def test_a_step_that_outlasts_its_job_goes_on_elsewhere_from_the_tokens_it_has(
    model_dir: str, seen: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        tool_job = ("--role", "tool", "--cpus", "4")
        async with jobs(tmp_path, ("--kill-wait-s", "9"), (), tool_job) as (client, running):
            rollout = Rollout(
                client,
                env=ToolAgent(steps=1, tokens=500),
                model=model_dir,
                engines=emulated(model_dir, seconds_per_token=0.02, slots=4),
                strategy=Strategy("sticky", ["placement=round-robin"]),
                out=out,
            )
            batch = asyncio.ensure_future(rollout.run(4))
            await until(lambda: rollout.progress().get("generating") == 4)
            running[0].send_signal(signal.SIGTERM)
            assert (await batch).counts == {"completed": 4}
            assert running[0].poll() == 0

    run(body())
    kinds = check_drained(out, seen, 4)
    assert kinds["EngineExpiring"] == 1
    steps = [record.steps[0] for record in RunReader(out)]
    assert sorted(step.preemptions for step in steps) == [0, 0, 1, 1]


def test_a_job_leaves_by_itself_before_its_end(tmp_path: Path) -> None:
    async def body() -> Any:
        async with jobs(tmp_path, ("--ends-in", "45", "--drain-s", "30", "--workers", "1")) as (
            client,
            running,
        ):
            await until(lambda: running[0].poll() is not None)
            assert running[0].stdout is not None
            told = running[0].stdout.read().splitlines()
            assert client.scheduler is not None
            assert (await client.scheduler.identity(n_workers=-1))["workers"] == {}
            return told

    told = run(body())
    assert told[0].startswith("heddle job job-0: 1 workers started; the job ends in ")
    assert told[-2].startswith("heddle job job-0: drains, since its time is over soon; ")
    assert told[-1] == "heddle job job-0: drained"
