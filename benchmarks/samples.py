"""CPU seconds of the path of one sample, from its task to a batch on disk, by part, and by the number of engines.

Parts of the driver and the training loop are the real ones, over trajectories of a given length: tasks and groups
(source, identities, ledger), journal and store, training arrays with the sample buffer and the batch file. The part of
the scheduler, which alone depends on the number of engines, is the controller with its strategies over the same
simulated rollout, events made by the simulator included: an upper bound. Engines, workers, Dask's messages and the
agent programs are not part of it (`python -m benchmarks overhead` and `python -m benchmarks live` measure those).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from benchmarks.scale import world_of
from benchmarks.tables import Column, print_measured_rows
from heddle_dask.cli.shared_options import COUNT, shared_options
from heddle_dask.core.run_description import StalenessBound
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.environments.base import Context, Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.task_sources import EnvironmentSource
from heddle_dask.live.driver.files.run_writer import RunWriter
from heddle_dask.live.driver.programs.attempts import group_attempts
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord
from heddle_dask.training.group_ledger import GroupLedger, GroupStart
from heddle_dask.training.groups import FinishedGroup, GroupPlan
from heddle_dask.training.sample_buffer import BatchRule
from heddle_dask.training.stored_samples import StoredSamples
from heddle_dask.workloads.choice import load_workload

MEMBERS = 8
GROUPS = 16
STEP_S = 60.0
WORKLOAD = "math"
MAX_CONTEXT_TOKENS = 32_000


@dataclass(frozen=True, slots=True)
class SamplesRow:
    """CPU seconds of one sample.

    Attributes
    ----------
    simulated
        Trajectories of the simulated rollout.
    groups_s, store_s, training_s, scheduler_s
        By part; see the module.
    share_of_step
        Of all parts for a batch of `batch` samples, in a training step of 60 s.
    """

    engines: int
    simulated: int
    batch: int
    groups_s: float
    store_s: float
    training_s: float
    scheduler_s: float
    total_s: float
    share_of_step: float


def measure_samples(
    engines: Sequence[int], *, batch: int, steps: int, step_tokens: int, preset: str, seed: int
) -> Iterator[SamplesRow]:
    """A row for each number of engines.

    Parameters
    ----------
    batch
        Samples of a training step.
    steps, step_tokens
        LLM steps of a sample, and tokens that each samples; as many are observed after it.
    """
    collect_seldom()
    records = [_record(number, steps, step_tokens) for number in range(MEMBERS * GROUPS)]
    groups_s = _groups_s(records, seed)
    with tempfile.TemporaryDirectory() as folder:
        store_s = asyncio.run(_store_s(records, Path(folder)))
        training_s = _training_s(records, Path(folder))
    for count in engines:
        simulated = max(256, 4 * count)
        scheduler_s = _scheduler_s(count, simulated, preset, seed)
        total_s = groups_s + store_s + training_s + scheduler_s
        yield SamplesRow(
            engines=count,
            simulated=simulated,
            batch=batch,
            groups_s=round(groups_s, 6),
            store_s=round(store_s, 6),
            training_s=round(training_s, 6),
            scheduler_s=round(scheduler_s, 6),
            total_s=round(total_s, 6),
            share_of_step=round(total_s * batch / STEP_S, 5),
        )


async def _solve(task: Task, ctx: Context) -> float:
    return 0.0


def _groups_s(records: Sequence[TrajectoryRecord], seed: int) -> float:
    plan = GroupPlan(MEMBERS, groups_per_batch=GROUPS)
    environment = FunctionEnvironment(_solve, name="env")
    began_s = time.process_time()
    source, ledger = EnvironmentSource(environment, seed), GroupLedger(plan)
    at = 0
    for position in range(GROUPS):
        start, sourced = GroupStart(position), source.task(position)
        attempts = group_attempts(environment, sourced.task, start.group_id, MEMBERS, seed)
        ledger.start(start, sourced.task.task_id, environment.name, [each.name for each in attempts])
        for attempt in attempts:
            ledger.ended(replace(records[at], trajectory_id=attempt.name))
            at += 1
    return (time.process_time() - began_s) / len(records)


async def _store_s(records: Sequence[TrajectoryRecord], folder: Path) -> float:
    writer = RunWriter(folder / "run.zarr", "create", {})
    began_s = time.process_time()
    for record in records:
        writer.finish(record)
        await asyncio.sleep(0)
    await writer.store()
    took_s = time.process_time() - began_s
    await writer.close()
    return took_s / len(records)


def _training_s(records: Sequence[TrajectoryRecord], folder: Path) -> float:
    bound = StalenessBound(1, "cancel", MEMBERS * GROUPS)
    began_s = time.process_time()
    with StoredSamples.create(folder / "train", BatchRule.of(bound, MEMBERS), "a") as samples:
        for number in range(GROUPS):
            mine = tuple(records[number * MEMBERS : (number + 1) * MEMBERS])
            samples.offer(FinishedGroup(f"g{number}", f"t{number}", "env", mine), "a")
        drawn = samples.draw()
        assert isinstance(drawn, Path), drawn
    return (time.process_time() - began_s) / len(records)


def _scheduler_s(engines: int, trajectories: int, preset: str, seed: int) -> float:
    plans = load_workload(
        WORKLOAD, trajectories=trajectories, samples=MEMBERS, seed=seed, max_context_tokens=MAX_CONTEXT_TOKENS
    )
    world = world_of(preset, plans, engines, MAX_CONTEXT_TOKENS, seed)
    began_s = time.process_time()
    world.run()
    return (time.process_time() - began_s) / trajectories


def _record(number: int, steps: int, step_tokens: int) -> TrajectoryRecord:
    """A finished trajectory; rewards of a group differ."""
    record, rows = TokenRecord(), []
    record.append(range(step_tokens), Attribution.PROMPT)
    for index in range(steps):
        start = len(record)
        record.append_sampled([7] * step_tokens, [-0.5] * step_tokens, policy_version=0)
        rows.append(
            StepRecord(
                step_index=index,
                branch=0,
                token_start=start,
                token_stop=len(record),
                engine_id="e",
                finish_reason="stop",
                prompt_tokens=start,
                generated_tokens=step_tokens,
                cached_tokens=0,
                preemptions=0,
                migrations=0,
                submitted_s=float(index),
                finished_s=index + 0.5,
                queue_s=0.0,
                prefill_s=0.1,
                decode_s=0.4,
                max_tokens=step_tokens,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
            )
        )
        record.append([9] * step_tokens, Attribution.TOOL)
    return TrajectoryRecord(
        trajectory_id=f"t{number}",
        group_id=f"g{number // MEMBERS}",
        task_id=f"t{number // MEMBERS}",
        environment="env",
        sample_index=number % MEMBERS,
        seed=number,
        status="completed",
        cause="",
        detail="",
        reward=float(number % 2),
        branches=(record,),
        steps=tuple(rows),
        actions=(),
        started_s=0.0,
        finished_s=float(steps),
    )


def _milliseconds(name: str, row: SamplesRow) -> str:
    return f"{1e3 * getattr(row, name):.2f}"


_PARTS = ("groups", "store", "training", "scheduler", "total")
COLUMNS: Sequence[Column] = (
    ("engines", lambda row: str(row.engines)),
    *((f"{part} ms", partial(_milliseconds, f"{part}_s")) for part in _PARTS),
    ("of a step", lambda row: f"{row.share_of_step:.2%}"),
)


@click.command("samples")
@click.option("--engines", type=COUNT, multiple=True, default=(1, 64, 1024), show_default=True)
@click.option("--batch", type=COUNT, default=512, show_default=True, help="Samples of a training step.")
@click.option("--steps", type=COUNT, default=5, show_default=True, help="LLM steps of a sample.")
@click.option("--step-tokens", type=COUNT, default=400, show_default=True, help="Tokens of a step.")
@click.option("--strategy", default="heddle", show_default=True, help="Preset of the scheduler.")
@shared_options
def samples(
    engines: tuple[int, ...],
    batch: int,
    steps: int,
    step_tokens: int,
    strategy: str,
    as_json: bool,
    seed: int,
) -> None:
    """CPU milliseconds of a sample by part, and the share of a training step of 60 s."""
    rows = measure_samples(engines, batch=batch, steps=steps, step_tokens=step_tokens, preset=strategy, seed=seed)
    print_measured_rows(rows, COLUMNS, as_json=as_json)
