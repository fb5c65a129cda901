"""The bias of redundancy towards short trajectories: lengths and rewards of those that count, against all.

Recorded attempts at one task run side by side, each on an engine slot of its own that generates at a constant rate, and
the ledger of groups says which count (`training.group_ledger`, the code of the live driver). What an attempt would have
been rewarded with is known also if it is cancelled, so both sides have the same attempts.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from heddle_dask.core.errors import BadInput
from heddle_dask.records.reader import RunReader
from heddle_dask.records.schema import is_ours
from heddle_dask.records.token_record import TokenRecord
from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord
from heddle_dask.training.group_ledger import CancelMember, DeliverGroup, GroupLedger, GroupStart
from heddle_dask.training.group_plan import GroupPlan, LateMembers
from heddle_dask.workloads.traces import read_traces

_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class RecordedAttempt:
    """One attempt: `seconds` from its start to its end, generated tokens, and the reward."""

    group: str
    seconds: float
    tokens: int
    reward: float


@dataclass(frozen=True, slots=True)
class RedundancyRow:
    """One workload with one amount of redundancy.

    Attributes
    ----------
    groups
        Groups that were started.
    tokens_counted, reward_counted
        Means over the delivered trajectories.
    tokens_all, reward_all
        Means over all trajectories that were started: what would have counted without redundancy.
    reward_bias_ci
        Mean over groups of the difference counted - all of the rewards, as a bootstrap interval (95 %) over groups.
    seconds_share
        Mean time until a group is complete, relative to waiting for all of its attempts.
    wasted_share
        Share of the generated tokens that was cancelled; a cancelled attempt counts what it had generated.
    """

    workload: str
    members: int
    extra_members: int
    extra_groups: int
    late_members: str
    groups: int
    tokens_counted: float
    tokens_all: float
    reward_counted: float
    reward_all: float
    reward_bias_ci: tuple[float, float]
    seconds_share: float
    wasted_share: float


def attempts_of_trace(trace: str | Path, token_s: float) -> list[RecordedAttempt]:
    """Attempts of a trace whose length and success are known.

    Parameters
    ----------
    token_s
        Seconds for one generated token; tools take what was recorded, waits for people nothing.
    """
    attempts = []
    for each in read_traces(trace):
        tokens = [step.generated_tokens for step in each.steps]
        if each.success is None or not each.complete or None in tokens:
            continue
        count = sum(number for number in tokens if number is not None)
        tools_s = sum(0.0 if step.human else step.tool_s or 0.0 for step in each.steps)
        attempts.append(RecordedAttempt(each.group_id, count * token_s + tools_s, count, float(each.success)))
    return attempts


def attempts_of_run(run: Path) -> list[RecordedAttempt]:
    """Attempts of a stored rollout, with the times that they took there: a real agent."""
    found = []
    reader = RunReader(run)
    for row in range(len(reader)):
        each = reader.outline(row)
        if each.reward is not None and each.status in ("completed", "truncated"):
            tokens = sum(step.generated_tokens for step in each.steps)
            took_s = each.finished_s - each.started_s
            found.append(RecordedAttempt(each.group_id, took_s, tokens, each.reward))
    return found


def measure_redundancy(
    workload: str | Path,
    *,
    members: int,
    extra_members: Sequence[int],
    extra_groups: Sequence[int],
    groups_per_batch: int,
    late_members: LateMembers = "cancel",
    token_s: float = 0.02,
    seed: int = 0,
) -> list[RedundancyRow]:
    """One row for each amount of redundancy; batches run one after the other.

    Raises
    ------
    BadInput
        The workload is neither a trace nor a stored run, or has no group with enough attempts.
    """
    path = Path(workload)
    attempts = attempts_of_run(path) if is_ours(path) else attempts_of_trace(workload, token_s)
    rows = []
    for extra in extra_members:
        groups = _groups(attempts, members + extra, seed)
        if len(groups) < groups_per_batch:
            raise BadInput(
                f"{str(workload)!r} has {len(groups)} tasks with {members + extra} attempts or more whose reward is "
                f"known: fewer than one batch of {groups_per_batch}"
            )
        for more in extra_groups:
            plan = GroupPlan(members, extra, groups_per_batch, more, late_members)
            rows.append(_row(str(workload), plan, groups, seed))
    return rows


def _groups(attempts: Iterable[RecordedAttempt], size: int, seed: int) -> list[list[RecordedAttempt]]:
    """Groups of `size` attempts at one task, in a seeded order; each attempt is in at most one."""
    by_task = defaultdict(list)
    for attempt in attempts:
        by_task[attempt.group].append(attempt)
    draw = random.Random(f"redundancy {seed}")
    groups = []
    for _, mine in sorted(by_task.items()):
        draw.shuffle(mine)
        groups += [mine[at : at + size] for at in range(0, len(mine) - size + 1, size)]
    draw.shuffle(groups)
    return groups


@dataclass(slots=True)
class _Tally:
    counted: list[RecordedAttempt]
    started: list[RecordedAttempt]
    biases: list[float]
    seconds: float = 0.0
    all_seconds: float = 0.0
    wasted: float = 0.0
    generated: float = 0.0


def _row(
    workload: str, plan: GroupPlan, groups: Sequence[Sequence[RecordedAttempt]], seed: int
) -> RedundancyRow:
    tally = _Tally([], [], [])
    size = plan.groups_per_batch + plan.extra_groups
    for at in range(0, len(groups) - size + 1, size):
        _play(plan, groups[at : at + size], tally)
    counted, started = tally.counted, tally.started
    return RedundancyRow(
        workload=workload,
        members=plan.members,
        extra_members=plan.extra_members,
        extra_groups=plan.extra_groups,
        late_members=plan.late_members,
        groups=len(tally.biases),
        tokens_counted=statistics.fmean(each.tokens for each in counted),
        tokens_all=statistics.fmean(each.tokens for each in started),
        reward_counted=statistics.fmean(each.reward for each in counted),
        reward_all=statistics.fmean(each.reward for each in started),
        reward_bias_ci=_interval(tally.biases, seed),
        seconds_share=tally.seconds / tally.all_seconds,
        wasted_share=tally.wasted / tally.generated if tally.generated else 0.0,
    )


def _play(plan: GroupPlan, groups: Sequence[Sequence[RecordedAttempt]], tally: _Tally) -> None:
    """One batch: all of its groups start at once."""
    ledger = GroupLedger(plan)
    ledger.open_batches(1)
    of: dict[str, RecordedAttempt] = {}
    for number, group in enumerate(groups):
        start = GroupStart(number)
        names = [f"{start.group_id}/{n}" for n in range(len(group))]
        ledger.start(start, start.group_id, "env", names)
        of |= dict(zip(names, group, strict=True))
    ends = [(each.seconds, name) for name, each in of.items()]
    heapq.heapify(ends)
    cancelled: dict[str, str] = {}
    counted: list[RecordedAttempt] = []
    while ends:
        now_s, name = heapq.heappop(ends)
        attempt, cause = of[name], cancelled.get(name)
        record = _record(name, cause)
        # The share of a cancelled attempt that was generated is that of its time.
        tokens = attempt.tokens * min(1.0, now_s / attempt.seconds) if attempt.seconds else attempt.tokens
        tally.generated += tokens
        tally.wasted += tokens if cause else 0.0
        for decision in ledger.ended(record):
            if isinstance(decision, CancelMember):
                ends = [(min(at, now_s) if n == decision.trajectory_id else at, n) for at, n in ends]
                heapq.heapify(ends)
                cancelled[decision.trajectory_id] = decision.cause
            elif isinstance(decision, DeliverGroup):
                counted += [of[each.trajectory_id] for each in decision.group.records]
                if not decision.group.late_for:
                    tally.seconds += now_s
                    tally.all_seconds += max(
                        of[n].seconds for n in of if n.startswith(f"{decision.group.group_id}/")
                    )
    tally.counted += counted
    tally.started += of.values()
    tally.biases.extend(_biases(counted, groups))


def _biases(
    counted: Sequence[RecordedAttempt], groups: Sequence[Sequence[RecordedAttempt]]
) -> Iterable[float]:
    """By group that counts: mean reward of its members that count - that of all groups of the batch."""
    of_all = statistics.fmean(each.reward for group in groups for each in group)
    kept = {id(each) for each in counted}
    for group in groups:
        mine = [each.reward for each in group if id(each) in kept]
        if mine:
            yield statistics.fmean(mine) - of_all


def _interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    draw = np.random.default_rng(seed)
    array = np.asarray(values)
    means = array[draw.integers(0, len(array), (_RESAMPLES, len(array)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _record(name: str, cause: str | None) -> TrajectoryRecord:
    """The end of an attempt as the ledger takes it; it needs no tokens."""
    steps: tuple[StepRecord, ...] = ()
    return TrajectoryRecord(
        trajectory_id=name,
        group_id=name.partition("/")[0],
        task_id="",
        environment="env",
        sample_index=0,
        seed=0,
        status="aborted" if cause else "completed",
        cause="redundant" if cause else "",
        detail="",
        reward=None if cause else 0.0,
        branches=(TokenRecord(),),
        steps=steps,
        actions=(),
        started_s=0.0,
        finished_s=0.0,
    )
