"""Which groups run, which of them are finished, and which trajectories are redundant. Pure: ends in, decisions out.

The first members of a group to end, and the first groups of a batch to be complete, count; the others are cancelled or
come late, as the plan says (RollArt, section 4.7). A group that lost a member to the bound on staleness or to a failing
environment is dropped as a whole, and replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from heddle_dask.core.run_description import REDUNDANT, STALE
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.records.trajectory_prefix import PREFIX
from heddle_dask.training.groups import FinishedGroup, GroupPlan

ENVIRONMENT: Final = "environment"
"""Cause of a dropped group: the environment of a member failed too often."""

DropCause = Literal["stale", "redundant", "environment", "prefix", "unfinished"]

_Phase = Literal["open", "finished", "dropped"]
_DROPS: Final[Mapping[str, DropCause]] = {STALE: "stale", ENVIRONMENT: "environment", PREFIX: "prefix"}
"""The end of a member for this cause drops its group."""


@dataclass(frozen=True, slots=True)
class CancelMember:
    """This trajectory is to end now."""

    trajectory_id: str
    cause: str


@dataclass(frozen=True, slots=True)
class DeliverGroup:
    """A group is finished. `counts`: it is one of those that its batch needs; else another one replaces it."""

    group: FinishedGroup
    counts: bool


@dataclass(frozen=True, slots=True)
class DropGroup:
    """A group has ended without being delivered.

    Attributes
    ----------
    cause
        ``"prefix"``: a member could not replay the group's prefix; the task is asked for again, from scratch.
        ``"unfinished"``: the run was interrupted; a resumed one goes on with it.
    tokens
        What its members had sampled.
    """

    group_id: str
    cause: DropCause
    tokens: int


LedgerDecision = CancelMember | DeliverGroup | DropGroup


@dataclass(frozen=True, slots=True)
class GroupStart:
    """What a group attempts: the task at a position of the source, for the first time or again.

    Attributes
    ----------
    prefix
        Tells the groups of one stream of a run from those of another.
    continuation
        How often the task was asked again because it was skewed (`prefix_sampling`); 0: it is not.
    """

    position: int
    repeat: int = 0
    prefix: str = ""
    continuation: int = 0

    @property
    def group_id(self) -> str:
        """Unique in the run; a task that is asked for again has another one."""
        number = f"{self.prefix}g{self.position:06d}" + (f"c{self.continuation}" if self.continuation else "")
        return f"{number}.{self.repeat}" if self.repeat else number

    def again(self) -> GroupStart:
        return replace(self, repeat=self.repeat + 1)


@dataclass(slots=True)
class _Group:
    start: GroupStart
    task_id: str
    environment: str
    batch: int
    running: dict[str, None]
    phase: _Phase = "open"
    cause: DropCause = "unfinished"
    records: list[TrajectoryRecord] = field(default_factory=list)
    complete: int = 0
    late: list[TrajectoryRecord] = field(default_factory=list)
    cancelled: Counter[str] = field(default_factory=Counter)
    finished: FinishedGroup | None = None
    counts: bool = False
    interrupted: bool = False

    def tokens(self) -> int:
        return sum(record.generated_tokens for record in self.records)


class GroupLedger:
    """The groups of one stream.

    Parameters
    ----------
    counts
        Whether a finished group counts for its batch: one without variance, for instance, does not, and is replaced.
        Asked once, when enough members have ended.
    counted
        Groups that counted in earlier sessions.

    Attributes
    ----------
    wasted_tokens
        Sampled tokens that no delivered member has, by cause.
    given_up
        Groups whose task was not asked for again, after `GroupPlan.max_repeats`.
    repeats
        Starts of tasks that are to be asked for again, oldest first; the driver takes them before new tasks.
    """

    def __init__(
        self,
        plan: GroupPlan,
        counts: Callable[[FinishedGroup], bool] = lambda group: True,
        counted: int = 0,
    ) -> None:
        self._plan = plan
        self._counts = counts
        self._through: int | None = None
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._started = counted
        self.counted = counted
        self.wasted_tokens: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.given_up = 0
        self.repeats: list[GroupStart] = []
        self._cancelled: dict[str, str] = {}

    def open_batches(self, through: int) -> None:
        """Groups may start until the batches 1 to `through` are full; before the first call, without a bound."""
        self._through = max(through, self._through or 0)

    def evicted(self, groups: int) -> None:
        """Groups that counted have left the sample buffer without being trained on: others replace them."""
        self.counted -= groups
        self._started -= groups

    @property
    def running(self) -> int:
        return sum(group.phase == "open" for group in self._groups.values())

    def wants_group(self) -> bool:
        """Whether the open batches lack groups that do not run yet; extra groups included."""
        if self._through is None:
            return True
        needed = self._through * self._plan.groups_per_batch - self.counted
        return needed > 0 and self.running < needed + self._plan.extra_groups

    def start(self, start: GroupStart, task_id: str, environment: str, members: Sequence[str]) -> None:
        cohort = self._plan.groups_per_batch + self._plan.extra_groups
        group = _Group(start, task_id, environment, 1 + self._started // cohort, dict.fromkeys(members))
        self._started += 1
        self._groups[start.group_id] = group
        self._group_of.update(dict.fromkeys(members, group))

    def ended(self, record: TrajectoryRecord, lost_tokens: int = 0, dropped_tokens: int = 0) -> list[LedgerDecision]:
        """A member has ended.

        Parameters
        ----------
        lost_tokens
            What earlier attempts of it, whose environment failed, had sampled.
        dropped_tokens
            What it had sampled in steps that did not end.
        """
        group = self._group_of.pop(record.trajectory_id)
        del group.running[record.trajectory_id]
        if lost_tokens:
            self._waste(group, ENVIRONMENT, lost_tokens)
        decisions: list[LedgerDecision] = []
        if record.status in ("completed", "truncated"):
            self._take_complete(group, record, decisions)
        elif record.cause in (STALE, REDUNDANT, ENVIRONMENT, PREFIX) or record.status == "aborted":
            self._waste(group, record.cause, record.generated_tokens + dropped_tokens)
            self._cancelled[record.trajectory_id] = record.cause
            if record.status == "aborted" and record.cause == "user":
                group.interrupted = True
            elif (cause := _DROPS.get(record.cause)) is not None and group.phase == "open":
                self._drop(group, cause, decisions)
        elif group.phase == "open":
            group.records.append(record)  # failed: delivered, but it does not count
        else:
            self._waste(group, record.cause, record.generated_tokens)
        if not group.running:
            self._close(group, decisions)
        return decisions

    def discarded(self, trajectory_id: str, tokens: int) -> None:
        """The step in which a member was cancelled had sampled these tokens; its engine says so after the end."""
        cause = self._cancelled.pop(trajectory_id, None)
        if cause is not None:
            self.wasted_tokens[cause] += tokens

    def _take_complete(self, group: _Group, record: TrajectoryRecord, decisions: list[LedgerDecision]) -> None:
        if group.phase == "finished" and self._plan.late_members == "keep":
            group.late.append(record)
        elif group.phase == "open":
            group.records.append(record)
            group.complete += 1
            if group.complete == self._plan.members:
                self._finish(group, decisions)
        else:
            # It came to its end although it was cancelled.
            self._waste(group, group.cause if group.phase == "dropped" else REDUNDANT, record.generated_tokens)

    def _finish(self, group: _Group, decisions: list[LedgerDecision]) -> None:
        group.phase = "finished"
        group.finished = FinishedGroup(group.start.group_id, group.task_id, group.environment, tuple(group.records))
        group.counts = self._counts(group.finished)
        if self._plan.late_members == "keep":
            decisions.append(DeliverGroup(replace(group.finished, cancelled_tokens=group.cancelled), group.counts))
        else:
            decisions.extend(CancelMember(name, REDUNDANT) for name in group.running)
        self._count(group.counts, decisions)

    def _count(self, counts: bool, decisions: list[LedgerDecision]) -> None:
        """A group is complete; one that fills its batch makes the extra groups of that batch redundant."""
        if not counts:
            self._started -= 1  # its successor is of the same batch
            return
        self.counted += 1
        batch, rest = divmod(self.counted, self._plan.groups_per_batch)
        if rest or self._plan.late_members == "keep":
            return
        late = [group for group in self._groups.values() if group.phase == "open" and group.batch <= batch]
        for group in late[: self._plan.extra_groups]:
            self._drop(group, "redundant", decisions)

    def _drop(self, group: _Group, cause: DropCause, decisions: list[LedgerDecision]) -> None:
        group.phase, group.cause = "dropped", cause
        self.dropped[cause] += 1
        decisions.extend(CancelMember(name, cause) for name in group.running)
        if cause != "redundant":
            self._started -= 1
        if cause == "prefix":
            self.repeats.append(group.start.again())
        elif cause == "stale":
            if group.start.repeat < self._plan.max_repeats:
                self.repeats.append(group.start.again())
            else:
                self.given_up += 1

    def _close(self, group: _Group, decisions: list[LedgerDecision]) -> None:
        if group.phase == "open" and not group.interrupted and group.records:
            self._finish(group, decisions)
        del self._groups[group.start.group_id]
        if group.phase == "finished":
            assert group.finished is not None
            if self._plan.late_members == "cancel":
                whole = replace(group.finished, cancelled_tokens=dict(group.cancelled))
                decisions.append(DeliverGroup(whole, group.counts))
            elif group.late:
                self._deliver_late(group, decisions)
            return
        if group.phase == "dropped":
            self.wasted_tokens[group.cause] += group.tokens()
        decisions.append(DropGroup(group.start.group_id, group.cause, group.tokens()))

    def _deliver_late(self, group: _Group, decisions: list[LedgerDecision]) -> None:
        assert group.finished is not None
        late = FinishedGroup(
            f"{group.start.group_id}+late",
            group.task_id,
            group.environment,
            tuple(group.late),
            late_for=group.start.group_id,
        )
        counts = self._counts(late)
        decisions.append(DeliverGroup(late, counts))
        if counts:
            self._started += 1
            self._count(counts, decisions)

    def _waste(self, group: _Group, cause: str, tokens: int) -> None:
        group.cancelled[cause] += tokens
        self.wasted_tokens[cause] += tokens
