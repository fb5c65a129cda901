"""What counted under an amount of redundancy against what was sampled, with intervals over groups. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.redundancy.attempts import Groups, RecordedAttempt, groups_of_run, groups_of_trace
from benchmarks.redundancy.replay import BatchOutcome, GroupOutcome, replay
from benchmarks.row_file import Row
from benchmarks.runner import Runner
from heddle_dask.core.errors import BadInput
from heddle_dask.records.schema import is_ours
from heddle_dask.training.groups import GroupPlan, LateMembers

_RESAMPLES = 1000

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class RedundancySweep:
    """The amounts of redundancy to compare: every number of extra members with every number of extra groups."""

    members: int
    extra_members: Sequence[int]
    groups_per_batch: int
    extra_groups: Sequence[int]
    late_members: Sequence[LateMembers] = ("cancel",)

    @property
    def attempts(self) -> int:
        """Attempts of a group that the largest amount needs."""
        return self.members + max(self.extra_members)

    def plans(self) -> list[GroupPlan]:
        """One for each amount."""
        return [
            GroupPlan(self.members, extra, self.groups_per_batch, more, late)
            for late in self.late_members
            for extra in self.extra_members
            for more in self.extra_groups
        ]

    def largest(self) -> GroupPlan:
        """The most redundancy of these, with cancellation."""
        return GroupPlan(self.members, max(self.extra_members), self.groups_per_batch, max(self.extra_groups), "cancel")


@dataclass(frozen=True, slots=True)
class RedundancyRow:
    """One workload with one amount of redundancy; an interval is of the difference counted - all, at 95 %.

    Attributes
    ----------
    measured
        ``"replayed"``: derived from attempts that all ran in full. ``"live"``: attempts were really cancelled; "all"
        are then those of a run in full of the same tasks with the same seeds.
    groups
        Groups that were started.
    tokens_counted, steps_counted, reward_counted
        Means over the delivered trajectories.
    tokens_all, steps_all, reward_all
        Means over all trajectories that were started, in full: what the policy does.
    late_share
        Share of the delivered trajectories that came after their batch was full.
    wasted_share
        Share of the sampled tokens that no delivered trajectory has.
    group_s, group_plain_s
        Mean time until a group that counts is complete; the same of these groups without extra members.
    batch_s, batch_plain_s
        Mean time until a batch has its groups; the same without extra members and groups.
    """

    workload: str
    measured: Literal["replayed", "live"]
    members: int
    extra_members: int
    groups_per_batch: int
    extra_groups: int
    late_members: str
    groups: int
    tokens_counted: float
    tokens_all: float
    tokens_ci: Interval
    steps_counted: float
    steps_all: float
    steps_ci: Interval
    reward_counted: float
    reward_all: float
    reward_ci: Interval
    late_share: float
    wasted_share: float
    group_s: float
    group_plain_s: float
    batch_s: float
    batch_plain_s: float


@dataclass(frozen=True, slots=True)
class RedundancyJob:
    """All amounts on one workload or environment; `how`: what the rows depend on beside the other fields."""

    workload: str
    sweep: RedundancySweep
    seed: int
    how: str


@dataclass(frozen=True, slots=True)
class RedundancyFigures:
    """The JSON form of the rows of one workload or environment."""

    rows: Sequence[Row]


def rows_of(
    runner: Runner, job: RedundancyJob, measure: Callable[[RedundancyJob], list[RedundancyRow]]
) -> list[RedundancyRow]:
    """The rows of a job, which is measured unless the runner's file has them."""
    (figures,) = runner.figures(
        RedundancyFigures,
        lambda job: RedundancyFigures([asdict(row) for row in measure(job)]),
        [job],
        lambda job, made: f"{job.workload}: {len(made.rows)} rows",
    )
    return [RedundancyRow(**row) for row in figures.rows]


def measure_redundancy(
    workload: str | Path, sweep: RedundancySweep, *, token_s: float = 0.02, seed: int = 0
) -> list[RedundancyRow]:
    """One row for each amount, on the attempts of a trace or a stored run; all rows have the same groups.

    Parameters
    ----------
    token_s
        Seconds of a generated token of a trace.

    Raises
    ------
    BadInput
        The workload is neither a trace nor a stored run, or has no group with enough attempts.
    """
    path = Path(workload)
    if is_ours(path):
        groups = groups_of_run(path, sweep.attempts)
    else:
        groups = groups_of_trace(workload, sweep.attempts, token_s, seed)
    return replayed_rows(str(workload), groups, sweep, seed)


def replayed_rows(workload: str, groups: Groups, sweep: RedundancySweep, seed: int) -> list[RedundancyRow]:
    """One row for each amount.

    Raises
    ------
    BadInput
        They are fewer than one batch.
    """
    needed = sweep.groups_per_batch + max(sweep.extra_groups)
    if len(groups) < needed:
        raise BadInput(
            f"{workload!r} has {len(groups)} groups of {sweep.attempts} attempts whose reward is known: fewer than "
            f"one batch of {needed}"
        )
    return [row_of(workload, "replayed", plan, replay(plan, groups), seed) for plan in sweep.plans()]


def row_of(
    workload: str,
    measured: Literal["replayed", "live"],
    plan: GroupPlan,
    batches: Sequence[BatchOutcome],
    seed: int,
) -> RedundancyRow:
    """What came of the batches, in one row."""
    outcomes = [outcome for batch in batches for outcome in batch.groups]
    complete = [(each.complete_s, each.plain_s) for each in outcomes if each.complete_s is not None]
    counted = [attempt for each in outcomes for attempt in each.counted]
    generated = sum(each.generated_tokens for each in outcomes)
    draws = np.random.default_rng(seed).integers(0, len(outcomes), (_RESAMPLES, len(outcomes)))
    tokens = _Compared(outcomes, lambda each: each.tokens, draws)
    steps = _Compared(outcomes, lambda each: each.steps, draws)
    reward = _Compared(outcomes, lambda each: each.reward, draws)
    return RedundancyRow(
        workload=workload,
        measured=measured,
        members=plan.members,
        extra_members=plan.extra_members,
        groups_per_batch=plan.groups_per_batch,
        extra_groups=plan.extra_groups,
        late_members=plan.late_members,
        groups=len(outcomes),
        tokens_counted=tokens.counted,
        tokens_all=tokens.sampled,
        tokens_ci=tokens.interval,
        steps_counted=steps.counted,
        steps_all=steps.sampled,
        steps_ci=steps.interval,
        reward_counted=reward.counted,
        reward_all=reward.sampled,
        reward_ci=reward.interval,
        late_share=sum(each.late for each in outcomes) / len(counted),
        wasted_share=1 - sum(each.tokens for each in counted) / generated if generated else 0.0,
        group_s=statistics.fmean(took_s for took_s, _ in complete),
        group_plain_s=statistics.fmean(plain_s for _, plain_s in complete),
        batch_s=statistics.fmean(batch.full_s for batch in batches),
        batch_plain_s=statistics.fmean(batch.plain_s for batch in batches),
    )


class _Compared:
    """A quantity of the counted attempts and of all; whole groups are drawn for the interval of the difference."""

    def __init__(
        self,
        outcomes: Sequence[GroupOutcome],
        of: Callable[[RecordedAttempt], float],
        draws: npt.NDArray[np.int64],
    ) -> None:
        counted, sampled = (
            np.array([[sum(map(of, mine)), len(mine)] for mine in side], dtype=float)
            for side in ([each.counted for each in outcomes], [each.sampled for each in outcomes])
        )
        self.counted, self.sampled = (float(np.divide(*each.sum(0))) for each in (counted, sampled))
        drawn, of_all = counted[draws].sum(1), sampled[draws].sum(1)
        drawn, of_all = drawn[drawn[:, 1] > 0], of_all[drawn[:, 1] > 0]
        low, high = np.quantile(drawn[:, 0] / drawn[:, 1] - of_all[:, 0] / of_all[:, 1], [0.025, 0.975])
        self.interval = float(low), float(high)
