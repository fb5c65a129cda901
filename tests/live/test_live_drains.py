"""Jobs that end during a rollout: what their workers hold goes elsewhere first. On a real cluster, emulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

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


@dataclass(slots=True)
class Jobs:
    """Jobs of one scheduler, by their number."""

    made: LocalRolloutCluster
    client: Client
    directory: Path
    running: list[Job] = field(default_factory=list)

    async def start(self, *options: Sequence[str]) -> None:
        """A job with a worker for each sequence of options; returns when they have joined."""
        names = set()
        for more in options:
            names.add(f"job-{len(self.running)}")
            self.running.append(started_job(self.made, self.directory, len(self.running), more))
        while not names <= await self.workers():
            await asyncio.sleep(0.05)

    async def workers(self) -> set[str]:
        assert self.client.scheduler is not None
        workers = (await self.client.scheduler.identity(n_workers=-1))["workers"]
        return {str(worker["name"]) for worker in workers.values()}


@contextlib.asynccontextmanager
async def jobs(directory: Path) -> AsyncIterator[Jobs]:
    """A scheduler, and the jobs that are started. At the end all have ended in order."""
    async with (
        LocalRolloutCluster(0, tool_workers=0, dashboard=False, asynchronous=True, directory=directory / "c") as made,
        Client(made, asynchronous=True) as client,
    ):
        each = Jobs(made, client, directory)
        try:
            yield each
        finally:
            for job in each.running:
                job.send_signal(signal.SIGTERM)
            codes = [await asyncio.to_thread(job.wait) for job in each.running]
            for job in each.running:
                assert job.stdout is not None
                job.stdout.close()
        assert codes == [0] * len(each.running)
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


async def told_of_their_end(jobs: Jobs, model_dir: str, out: Path) -> None:
    """The first of two jobs with engines and the first of two with tools end while they work."""
    rollout_job, tool_job = ("--drain-s", "40"), ("--role", "tool", "--cpus", "4", "--drain-s", "40")
    await jobs.start(rollout_job, rollout_job, tool_job, tool_job)
    rollout = Rollout(
        jobs.client,
        env=ToolAgent(steps=6, tokens=50, tool_s=0.15),
        model=model_dir,
        engines=emulated(model_dir, seconds_per_token=0.006, slots=2, steps_ahead=1, kv_transfer=True),
        strategy="heddle",
        samples=2,
        seed=5,
        out=out,
    )
    batch = asyncio.ensure_future(rollout.run(8))
    await until(lambda: rollout.progress()["tokens"] > 300)
    ending = (jobs.running[0], jobs.running[2])
    started = [process for job in ending for process in below(job)]
    for process in started:
        process.send_signal(signal.SIGTERM)  # as a batch system may send it to every process of a job
    for job in ending:
        job.send_signal(signal.SIGUSR1)
    await until(lambda: all(job.poll() is not None for job in ending))
    assert not any(process.is_running() for process in started)
    assert (await batch).counts == {"completed": 16}


async def ended_in_their_step(jobs: Jobs, model_dir: str, out: Path) -> None:
    """A new job with an engine has less time than its steps take; a new one with tools leaves by itself meanwhile."""
    await jobs.start(("--kill-wait-s", "9"), ("--role", "tool", "--ends-in", "45", "--drain-s", "30"))
    rollout = Rollout(
        jobs.client,
        env=ToolAgent(steps=1, tokens=400),
        model=model_dir,
        engines=emulated(model_dir, seconds_per_token=0.02, slots=4),
        strategy=Strategy("sticky", ["placement=round-robin"]),
        out=out,
    )
    batch = asyncio.ensure_future(rollout.run(4))
    await until(lambda: rollout.progress().get("generating") == 4)
    jobs.running[4].send_signal(signal.SIGTERM)
    assert (await batch).counts == {"completed": 4}
    assert jobs.running[4].poll() == 0

    alone = jobs.running[5]
    await until(lambda: alone.poll() is not None)
    assert alone.stdout is not None
    told = alone.stdout.read().splitlines()
    assert told[0].startswith("heddle job job-5: 1 workers started; the job ends in ")
    assert told[-2].startswith("heddle job job-5: drains, since its time is over soon; ")
    assert told[-1] == "heddle job job-5: drained"
    assert await jobs.workers() == {"job-1", "job-3"}


def test_jobs_that_end_give_their_work_to_the_others_in_time(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = tmp_path / "told.zarr", tmp_path / "outlasting.zarr"
    seen = [path.with_suffix(".jsonl") for path in outs]

    async def body() -> None:
        async with jobs(tmp_path) as each:
            for work, out, path in zip((told_of_their_end, ended_in_their_step), outs, seen, strict=True):
                # What goes to the engines and what they sample is written there.
                recording = partial(RecordingWorker, path=str(path))
                monkeypatch.setattr(open_session, "RolloutWorker", lambda spec, watch, made=recording: made(spec))
                await work(each, model_dir, out)

    run(body())
    kinds = check_drained(outs[0], seen[0], 16)
    assert kinds["EngineDraining"] == kinds["HostDraining"] == kinds["ReleaseHost"] == 1
    moves = [command for _, commands in control_lines(outs[0]) for command in commands if command[0] == "MoveContext"]
    left = [(kind, source) for _, _, source, _, kind in moves if source.startswith("job-0/")]
    assert left and {kind for kind, _ in left} == {"transfer"}, "contexts moved with their KV caches"

    kinds = check_drained(outs[1], seen[1], 4)
    assert kinds["EngineExpiring"] == 1
    steps = [record.steps[0] for record in RunReader(outs[1])]
    assert sorted(step.preemptions for step in steps) == [0, 0, 1, 1], "they went on from the tokens that they had"
