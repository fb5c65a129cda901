"""Which attempts of full groups count under a plan, by the ledger of the live driver. Pure.

The attempts of a batch start together and take the time that they took in full; what one would have been rewarded with
is known also if it is cancelled.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.redundancy.attempts import Groups, RecordedAttempt
from heddle_dask.core.run_description import REDUNDANT
from heddle_dask.records.token_record import TokenRecord
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.group_ledger import CancelMember, DeliverGroup, GroupLedger, GroupStart
from heddle_dask.training.group_plan import GroupPlan

_ENVIRONMENT: Final = "env"


@dataclass(slots=True)
class GroupOutcome:
    """What became of one group.

    Attributes
    ----------
    sampled
        All attempts that were started, as they are in full.
    counted
        Those that were delivered; `late` of them after the batch was full.
    generated_tokens
        Sampled until the end or the cancellation.
    complete_s
        When enough members had ended, from the start of the batch; None: the group was cancelled before.
    plain_s
        When the group would have been complete without extra members.
    """

    sampled: Sequence[RecordedAttempt]
    counted: list[RecordedAttempt] = field(default_factory=list)
    late: int = 0
    generated_tokens: float = 0.0
    complete_s: float | None = None
    plain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """One batch; `full_s`: when the last group that it needs was complete, `plain_s`: the same without redundancy."""

    groups: Sequence[GroupOutcome]
    full_s: float
    plain_s: float


def replay(plan: GroupPlan, groups: Groups) -> list[BatchOutcome]:
    """The batches that the groups fill, in their order; of each group the first attempts that the plan starts."""
    size = plan.groups_per_batch + plan.extra_groups
    started = [group[: plan.attempts] for group in groups]
    return [_play(plan, started[at : at + size]) for at in range(0, len(started) - size + 1, size)]


def _play(plan: GroupPlan, groups: Sequence[Sequence[RecordedAttempt]]) -> BatchOutcome:
    ledger = GroupLedger(plan)
    ledger.open_batches(1)
    outcomes: dict[str, GroupOutcome] = {}
    of: dict[str, RecordedAttempt] = {}
    for number, group in enumerate(groups):
        start = GroupStart(number)
        names = [f"{start.group_id}/{n}" for n in range(len(group))]
        ledger.start(start, start.group_id, _ENVIRONMENT, names)
        of |= dict(zip(names, group, strict=True))
        plain_s = max(each.seconds for each in group[: plan.members])
        outcomes[start.group_id] = GroupOutcome(group, plain_s=plain_s)
    ends = [(each.seconds, name) for name, each in of.items()]
    heapq.heapify(ends)
    cancelled: set[str] = set()
    completions: list[float] = []
    while ends:
        now_s, name = heapq.heappop(ends)
        outcome, attempt = outcomes[_group_of(name)], of[name]
        # The share of a cancelled attempt that was generated is that of its time.
        share = min(1.0, now_s / attempt.seconds) if attempt.seconds else 1.0
        outcome.generated_tokens += attempt.tokens * share
        for decision in ledger.ended(_end(name, name in cancelled)):
            if isinstance(decision, CancelMember):
                ends = [(min(at, now_s) if n == decision.trajectory_id else at, n) for at, n in ends]
                heapq.heapify(ends)
                cancelled.add(decision.trajectory_id)
            elif isinstance(decision, DeliverGroup):
                mine = outcomes[decision.group.late_for or decision.group.group_id]
                records = decision.group.records
                mine.counted += [of[each.trajectory_id] for each in records]
                mine.late += len(records) if len(completions) >= plan.groups_per_batch else 0
                completions.append(now_s)
                if not decision.group.late_for:
                    mine.complete_s = now_s
    plain = [each.plain_s for each in outcomes.values()]
    return BatchOutcome(
        tuple(outcomes.values()),
        full_s=completions[plan.groups_per_batch - 1],
        plain_s=max(plain[: plan.groups_per_batch]),
    )


def _group_of(name: str) -> str:
    return name.partition("/")[0]


def _end(name: str, is_cancelled: bool) -> TrajectoryRecord:
    """The end of an attempt as the ledger takes it; it needs no tokens."""
    return TrajectoryRecord(
        trajectory_id=name,
        group_id=_group_of(name),
        task_id="",
        environment=_ENVIRONMENT,
        sample_index=0,
        seed=0,
        status="aborted" if is_cancelled else "completed",
        cause=REDUNDANT if is_cancelled else "",
        detail="",
        reward=None if is_cancelled else 0.0,
        branches=(TokenRecord(),),
        steps=(),
        actions=(),
        started_s=0.0,
        finished_s=0.0,
    )
