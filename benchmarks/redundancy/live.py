"""Groups of an environment on real engines: once in full, and again with cancellation, on the same tasks and seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distributed import Client

from benchmarks.live_engines import running_engines
from benchmarks.redundancy.attempts import Groups, attempt_of, groups_of_run
from benchmarks.redundancy.replay import BatchOutcome, GroupOutcome
from benchmarks.redundancy.rows import RedundancyRow, RedundancySweep, replayed_rows, row_of
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Environment
from heddle_dask.environments.loading import load_environment
from heddle_dask.environments.task_sources import ListSource
from heddle_dask.live.driver.options import Engines, Sampling
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.reader import RunReader
from heddle_dask.training.groups import FinishedGroup, GroupPlan


@dataclass(frozen=True, slots=True)
class LiveGroups:
    """How an environment is rolled out.

    Attributes
    ----------
    tasks
        Groups that run in full.
    out
        Directory for the stored runs.
    cancel_live
        Whether the most redundancy is run again with cancellation.
    """

    spec: EngineSpec
    engines: int
    tasks: int
    out: Path
    cancel_live: bool
    seed: int


async def measure_environment(env: str, how: LiveGroups, sweep: RedundancySweep) -> list[RedundancyRow]:
    """Rows that are derived from the run in full, and one for the run with cancellation.

    Raises
    ------
    BadInput
        Unknown environment, fewer tasks than one batch, or a run that is there already.
    """
    environment = load_environment(env)
    largest = sweep.largest()
    size = largest.groups_per_batch + largest.extra_groups
    if how.tasks < size:
        raise BadInput(f"{how.tasks} tasks are fewer than one batch with its extra groups: use at least {size}")
    in_full = GroupPlan(sweep.attempts, groups_per_batch=how.tasks, max_running=size * sweep.attempts)
    stored = how.out / f"{env.replace(':', '-')}.zarr"
    async with running_engines(how.engines, how.spec) as client:
        await _roll_out(client, environment, in_full, how, how.tasks, stored)
        groups = groups_of_run(stored, sweep.attempts)
        rows = replayed_rows(env, groups, sweep, how.seed)
        if how.cancel_live:
            plan = replace(largest, max_running=in_full.max_running)
            again = stored.with_suffix(".cancelled.zarr")
            batches = await _roll_out(client, environment, plan, how, how.tasks // size * size, again)
            outcomes = live_outcomes(plan, batches, groups, _generated_tokens(again))
            rows.append(row_of(env, "live", plan, outcomes, how.seed))
    return rows


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """The groups that a live batch delivered, and the ids of those that it began."""

    finished: Sequence[FinishedGroup]
    begun: Sequence[str]


async def _roll_out(
    client: Client, environment: Environment, plan: GroupPlan, how: LiveGroups, tasks: int, out: Path
) -> list[LiveBatch]:
    """Batches one after the other; the next one opens when the one before has its groups."""
    source = ListSource(environment.tasks(tasks, how.seed), environment)
    batches: list[LiveBatch] = []
    finished: list[FinishedGroup] = []
    begun: list[str] = []
    async with Rollout(
        client,
        env=environment,
        model=how.spec.model,
        engines=Engines(spec=how.spec, count=how.engines),
        sampling=Sampling(seeded=True),
        seed=how.seed,
        out=out,
    ) as rollout:
        stream = rollout.stream_groups(source, plan)
        stream.watch(begun.append, lambda group_id: None)
        stream.open_batches(1)
        async for group in stream:
            finished.append(group)
            if len(finished) == plan.groups_per_batch:
                batches.append(LiveBatch(tuple(finished), tuple(begun)))
                finished.clear()
                begun.clear()
                stream.open_batches(len(batches) + 1)
    return batches


def live_outcomes(
    plan: GroupPlan, batches: Sequence[LiveBatch], groups: Groups, generated_tokens: Mapping[str, int]
) -> list[BatchOutcome]:
    """What counted of the groups that were also run in full. Pure.

    Parameters
    ----------
    groups
        Those in full.
    generated_tokens
        What was sampled, by group, until the end or the cancellation.
    """
    in_full = {group[0].group: group[: plan.attempts] for group in groups}
    found = []
    for batch in batches:
        outcomes = {
            name: GroupOutcome(
                in_full[name],
                generated_tokens=generated_tokens[name],
                plain_s=max(each.seconds for each in in_full[name][: plan.members]),
            )
            for name in batch.begun
            if name in in_full
        }
        began_s = min(record.started_s for group in batch.finished for record in group.records)
        ended_s = max(record.finished_s for group in batch.finished for record in group.records)
        for group in batch.finished:
            if group.group_id in outcomes:
                mine = outcomes[group.group_id]
                mine.counted = [attempt_of(each) for each in group.records if each.reward is not None]
                first_s = min(each.started_s for each in group.records)
                mine.complete_s = max(each.finished_s for each in group.records) - first_s
        plain = [each.plain_s for each in outcomes.values()][: plan.groups_per_batch]
        found.append(BatchOutcome(tuple(outcomes.values()), ended_s - began_s, max(plain)))
    return found


def _generated_tokens(run: Path) -> Counter[str]:
    generated: Counter[str] = Counter()
    reader = RunReader(run)
    for each in map(reader.outline, range(len(reader))):
        generated[each.group_id] += each.generated_tokens
    return generated
