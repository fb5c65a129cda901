"""What a batch system costs a rollout: the phases from an accepted job to its first step, and the loss of a job.

Runs on any SLURM, with emulated engines in the jobs of a cluster file: what is measured is the way to an engine that
answers, not the engine. Wall clocks of this machine and the nodes are compared.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from distributed import Client

from benchmarks.slurm_loss import LostJob, lost_job
from heddle_dask.cli.engine_option import chosen_model
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.clusters.slurm.cluster import SlurmCluster
from heddle_dask.live.clusters.slurm.cluster_file import read_cluster_file
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Engines
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.wire.driver_messages import GetCapacity
from heddle_dask.live.wire.transport import ask_scheduler

PHASES = ("queue", "launcher", "worker", "engine", "first_step")
_LOOK_S = 0.01
SECONDS_PER_TOKEN = 0.02
SLOTS = 8
# A step takes four seconds: the second one of every trajectory has just begun.
_STEP_TOKENS = 200
_BEFORE_THE_KILL_S = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of the phases of one start.

    Attributes
    ----------
    queue
        From the job's acceptance to its first line of shell.
    launcher
        To the line of the launcher that its workers are started: Python's start, and the scheduler found.
    worker
        Until the worker is on the scheduler.
    engine
        Until its engine answers.
    first_step
        Until the driver has the result of the first LLM step, one of one token.
    """

    queue: float
    launcher: float
    worker: float
    engine: float
    first_step: float

    @property
    def total(self) -> float:
        """From the job's acceptance to the first step."""
        return self.queue + self.launcher + self.worker + self.engine + self.first_step


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One start, or one loss of a job, on the groups of a cluster file; `content` is its text.

    `model` is as it was given: what is the same on every machine is the key of a row, and the place of the shipped
    model is not.
    """

    cluster: str
    content: str
    model: str | None
    repeat: int


F = TypeVar("F")


def in_its_folder(measure: Callable[[ClusterPlan, str, Path], Coroutine[Any, Any, F]], job: SlurmJob) -> F:
    """The figures of a job, whose logs and run are in a folder that the nodes see.

    Raises
    ------
    BadInput
        As `measure`, or the cluster file is none.
    """
    plan = read_cluster_file(Path(job.cluster))
    shared = plan.logs or plan.shared or Path.cwd()
    shared.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="heddle-bench-", dir=shared) as directory:
        there = replace(plan, logs=Path(directory) / "logs")
        return asyncio.run(measure(there, chosen_model(job.model, "emulated"), Path(directory) / "run.zarr"))


class BenchAgent:
    """Steps of `tokens` tokens; notes when the first one of all was there."""

    name = "bench-slurm"

    def __init__(self, steps: int, tokens: int) -> None:
        self.first_s = 0.0
        self._steps, self._tokens = steps, tokens

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [Task(f"t{number}", f"Task {number}.", max_steps=self._steps) for number in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float | None:
        ctx.append("user", task.prompt)
        for _ in range(self._steps):
            await ctx.generate(max_tokens=self._tokens, ignore_eos=True)
            self.first_s = self.first_s or time.time()
            ctx.append("user", "Go on.")
        return None


def with_jobs(plan: ClusterPlan, jobs: int, most: int = 1) -> tuple[ClusterPlan, WorkerGroup]:
    """The plan with so many jobs of its first group of engines, which note when their shells begin."""
    group = next((group for group in plan.groups.values() if group.role == "rollout"), None)
    if plan.backend != "slurm" or group is None:
        raise BadInput("bench slurm needs backend = 'slurm' and a group with role = 'rollout'")
    assert plan.logs is not None
    note = f'date +%s.%N > "{plan.logs}/$SLURM_JOB_NAME.began"'
    group = replace(
        group,
        prologue=(note, *group.prologue),
        minimum=jobs,
        initial=jobs,
        maximum=max(jobs, most, group.most),
    )
    return replace(plan, groups={**plan.groups, group.name: group}), group


def engines(model: str, count: int) -> Engines:
    options = EmulatedOptions(cost={"seconds_per_token": SECONDS_PER_TOKEN})
    return Engines(spec=EngineSpec("emulated", model, slots=SLOTS, max_model_len=4096, options=options), count=count)


async def measure_start(plan: ClusterPlan, model: str, out: Path) -> Start:
    """Start one job with an engine, and run one step on it.

    Raises
    ------
    BadInput
        The plan has no group of engines in SLURM jobs, or SLURM refuses one.
    """
    plan, group = with_jobs(plan, 1)
    assert plan.logs is not None
    name = f"{group.name}-0"
    cluster = SlurmCluster(plan, asynchronous=True)
    accepted = asyncio.ensure_future(_when(lambda: _job_id(cluster, name)))
    async with cluster, Client(cluster, asynchronous=True) as client:
        agent = BenchAgent(steps=1, tokens=1)
        rollout = Rollout(client, env=agent, model=model, engines=engines(model, 1), out=Output(out))
        await _when(lambda: _job_id(cluster, name))
        log = plan.logs / f"{name}-{_job_id(cluster, name)}.log"
        looks = asyncio.gather(
            _when(lambda: log.exists() and "workers started" in log.read_text(errors="replace")),
            _when(lambda: _workers(cluster, (name, f"{name}-0"))),
            _when_engines(client, 1),
        )
        await rollout.run(1)
        started_s, joined_s, ready_s = await looks
    accepted_s, began_s = await accepted, float((plan.logs / f"{name}.began").read_text())
    return Start(
        began_s - accepted_s,
        started_s - began_s,
        joined_s - started_s,
        ready_s - joined_s,
        agent.first_s - ready_s,
    )


async def measure_loss(plan: ClusterPlan, model: str, out: Path) -> LostJob:
    """Kill one of two jobs with engines while steps run on both.

    Raises
    ------
    BadInput
        As `measure_start`.
    """
    plan, group = with_jobs(plan, 2)
    name = f"{group.name}-0"
    cluster = SlurmCluster(plan, asynchronous=True)
    async with cluster, Client(cluster, asynchronous=True) as client:
        agent = BenchAgent(steps=5, tokens=_STEP_TOKENS)
        rollout = Rollout(client, env=agent, model=model, engines=engines(model, 2), out=Output(out))
        running = asyncio.ensure_future(rollout.run(12))
        await asyncio.wait(
            [running, asyncio.ensure_future(_when(lambda: agent.first_s))], return_when="FIRST_COMPLETED"
        )
        await asyncio.sleep(_BEFORE_THE_KILL_S)
        job_id = _job_id(cluster, name)
        assert job_id is not None
        killed_s = time.time()
        # The launcher alone, at once, and what it has started ends with it: without --batch SIGTERM would come first.
        await asyncio.to_thread(subprocess.run, ["scancel", "--batch", "--signal=KILL", job_id], check=True)
        gone_s = await _when(lambda: not _workers(cluster, (name, f"{name}-0")))
        replaced_s = await _when(lambda: _workers(cluster, (f"{group.name}-2", f"{group.name}-2-0")))
        batch = await running
    ended = [record.status for record in batch]
    return lost_job(out, name, ended, gone_s - killed_s, replaced_s - killed_s)


def summary(starts: Sequence[Start], losses: Sequence[LostJob]) -> dict[str, Any]:
    """Medians and ranges, JSON-able."""
    phases = {phase: [getattr(start, phase) for start in starts] for phase in (*PHASES, "total")}
    rows = [
        {
            "phase": phase,
            "median_s": round(statistics.median(values), 2),
            "least_s": round(min(values), 2),
            "most_s": round(max(values), 2),
        }
        for phase, values in phases.items()
    ]
    return {"starts": len(starts), "rows": rows, "losses": [asdict(loss) for loss in losses]}


def _job_id(cluster: SlurmCluster, name: str) -> str | None:
    job = cluster.workers.get(name)
    return None if job is None else getattr(job, "job_id", None)


def _workers(cluster: SlurmCluster, names: Sequence[str]) -> list[str]:
    found = [str(worker["name"]) for worker in cluster.scheduler_info["workers"].values()]
    return [name for name in found if name in names]


async def _when(happened: Callable[[], Any]) -> float:
    """The wall clock when a condition first holds."""
    while not happened():
        await asyncio.sleep(_LOOK_S)
    return time.time()


async def _when_engines(client: Client, count: int) -> float:
    """The wall clock when so many engines first answer."""
    while True:
        capacity = await ask_scheduler(client, GetCapacity())
        if len(capacity.engines) >= count:
            return time.time()
        await asyncio.sleep(_LOOK_S)
