"""The sample buffer: finished groups wait here until an optimiser step takes them.

A pure state machine. Its methods return the events that happened, which are already applied; `SampleBuffer.replayed`
makes an equal buffer from them. Nothing in it knows tokens or files: `stored_samples` keeps those.

Let n be the number of finished optimiser steps when a batch is trained (its step less 1), and b the version that
sampled the first token of a group's oldest member. What the buffer promises, for every batch (RollArt, section 6.2):

- n - b <= alpha for each of its groups. What exceeds this is evicted before the batch is formed, and counted.
- Its groups are the oldest that wait: by b, then by the order of their arrival.
- No group is in two batches, and an accepted group leaves by a batch or by a counted eviction.
- With ``pace``, a batch waits for the oldest running groups where later batches have no place for all of them: what
  takes long is not starved by what is short. With the credits of `core.run_description`, nothing is evicted then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from heddle_dask.core.errors import BadInput, check_count
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.run_description import STALE, StalenessBound
from heddle_dask.training.buffer_events import (
    FOREIGN,
    NO_VARIANCE,
    BatchFormed,
    BatchTrained,
    BufferCounts,
    BufferedGroup,
    BufferEvent,
    GroupAccepted,
    GroupDropped,
    LineageBegan,
)
from heddle_dask.training.group_records import FEWEST_MEMBERS, TOO_FEW
from heddle_dask.training.groups import TruncatedAttempts

EMPTY_DRAWS = 10
"""Default number of draws without a group to learn from after which a run ends."""


class NothingToLearn(BadInput):
    """No group of many had different rewards; the message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How batches are formed.

    Attributes
    ----------
    groups
        Groups in a batch; late members come on top.
    bound
        The bound on their age, and whether a batch waits for what is old (``pace``).
    waits_for_oldest
        False where more groups run than batches need, and the first to finish count: nothing is waited for.
    empty_draws
        A draw is as many arrivals as a batch has groups; after so many without anything to learn the run ends.
    truncated
        What becomes of attempts that ended at a limit. The default is ``"count"``: to end within the limits is part of
        a task, and what masks the others learns nothing from the longest.
    """

    groups: int
    bound: StalenessBound
    waits_for_oldest: bool = True
    empty_draws: int = EMPTY_DRAWS
    truncated: TruncatedAttempts = "count"

    @classmethod
    def of(
        cls,
        bound: StalenessBound,
        group_size: int,
        waits_for_oldest: bool = True,
        empty_draws: int = EMPTY_DRAWS,
        truncated: TruncatedAttempts = "count",
    ) -> BatchRule:
        """The rule for groups of `group_size` members.

        Raises
        ------
        BadInput
            No number of groups fills a batch.
        """
        check_count("group size", group_size, FEWEST_MEMBERS)
        check_count("empty draws", empty_draws)
        groups, rest = divmod(bound.batch_trajectories, group_size)
        if rest:
            sizes = " or ".join(str(n * group_size) for n in (groups, groups + 1) if n)
            raise BadInput(
                f"a batch of {bound.batch_trajectories} trajectories cannot be made of groups of {group_size}: "
                f"use {sizes}"
            )
        return cls(groups, bound, waits_for_oldest, empty_draws, truncated)


@dataclass(frozen=True, slots=True)
class BatchWaits:
    """There is no batch yet.

    Attributes
    ----------
    groups, needed
        Groups that could be taken, and those that a batch needs.
    running
        Groups that are waited for, because later batches would have no place for all of them (``pace``).
    """

    groups: int
    needed: int
    running: tuple[str, ...] = ()


class SampleBuffer:
    def __init__(self, rule: BatchRule, lineage: str) -> None:
        self.rule = rule
        self.counts = BufferCounts()
        self._lineage = lineage
        # The newest number of each line of training that is an ancestor of the current weights; None: all of them.
        self._newest_of: dict[str, int | None] = {lineage: None}
        self._waiting: dict[str, BufferedGroup] = {}  # in the order of arrival
        self._running: dict[str, int] = {}
        self._formed: dict[int, BatchFormed] = {}
        self._formed_step = 0
        self._trained_step = 0
        self._since: dict[str, int] = {}  # by the id of each group that came: the newest batch there was
        self._rewards: dict[str, tuple[float, ...]] = {}  # of delivered members, by the id of the whole group
        self._arrivals_without_use = 0
        self._in_use = 0

    @classmethod
    def replayed(cls, rule: BatchRule, lineage: str, events: Iterable[BufferEvent]) -> SampleBuffer:
        """The buffer after these events; nothing runs, and empty draws count from here.

        Parameters
        ----------
        lineage
            The one with which the first event was made.
        """
        buffer = cls(rule, lineage)
        for event in events:
            buffer._apply(event)
        buffer._arrivals_without_use = 0
        return buffer

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self._lineage, self._trained_step)

    @property
    def next_step(self) -> int:
        """The optimiser step for which `draw` forms a batch."""
        return self._formed_step + 1

    @property
    def waiting(self) -> tuple[BufferedGroup, ...]:
        return tuple(self._waiting.values())

    @property
    def running(self) -> Mapping[str, int]:
        return dict(self._running)

    @property
    def accepted_trajectories(self) -> int:
        """Trajectories that went into batches or wait, since the training began: for `StalenessBound.credits`."""
        return self._in_use

    @property
    def open_batches(self) -> tuple[BatchFormed, ...]:
        """Batches that were formed and whose optimiser step is in no checkpoint, oldest first."""
        return tuple(self._formed[step] for step in range(self._trained_step + 1, self._formed_step + 1))

    def knows(self, group_id: str) -> bool:
        return group_id in self._since

    def rewards_of(self, group_id: str) -> tuple[float, ...]:
        """Rewards of the members of a group that were delivered: what late members are compared with."""
        return self._rewards.get(group_id, ())

    def begin(self, group_id: str, first_version: int) -> None:
        """A group runs. `first_version` is the version that samples its first token, or an older one.

        What runs is not in the log: after a crash nothing runs.
        """
        self._running.setdefault(group_id, first_version)

    def end(self, group_id: str) -> None:
        """A group does not run any more, and delivers nothing; one that is unknown is ignored."""
        self._running.pop(group_id, None)

    def offer(self, group: BufferedGroup) -> tuple[BufferEvent, ...]:
        """Take a finished group, or drop it.

        Nothing happens for a group that was offered before: after a crash, groups may be delivered twice.
        """
        self.end(group.group_id)
        if self.knows(group.group_id):
            return ()
        cause = self._cause_to_refuse(group)
        return self._happen(_dropped(group, cause) if cause else GroupAccepted(group))

    def drop(
        self, group_id: str, environment: str, cause: str, sampled_tokens: Sequence[int] = ()
    ) -> tuple[BufferEvent, ...]:
        """Count a group that cannot be offered: too few members have a reward, or it was cancelled."""
        self.end(group_id)
        if self.knows(group_id):
            return ()
        return self._happen(GroupDropped(group_id, environment, cause, tuple(sampled_tokens)))

    def evict(self) -> tuple[BufferEvent, ...]:
        """Drop what the next batch may not take any more; `draw` does this first."""
        events: list[BufferEvent] = []
        for group in self.waiting:
            cause = self._cause_of_age(group)
            if cause:
                events += self._happen(_dropped(group, cause))
        return tuple(events)

    def draw(self) -> BatchFormed | BatchWaits:
        """Form the batch of `next_step` from the oldest groups that wait.

        The event is not applied yet: the caller stores the batch first, then calls `form` with it. Call `evict` before,
        and log what it returns.

        Raises
        ------
        NothingToLearn
            After `BatchRule.empty_draws` draws in a row.
        """
        # Of equal ones the first that arrived: the sort is stable.
        valid = sorted((g for g in self._waiting.values() if not self._cause_of_age(g)), key=lambda g: g.first_version)
        groups = [group for group in valid if not group.late_for]
        late = [group for group in valid if group.late_for]
        needed = self.rule.groups
        awaited = self._awaited(groups)
        if len(groups) < needed or awaited:
            if len(groups) < needed:
                self._check_something_to_learn()
            return BatchWaits(len(groups), needed, awaited)
        chosen = [group.group_id for group in (*groups[:needed], *late)]
        return BatchFormed(self.next_step, self._lineage, tuple(chosen))

    def form(self, batch: BatchFormed) -> tuple[BufferEvent, ...]:
        """The batch that `draw` has chosen is stored: it is given out now."""
        return self._happen(batch)

    def trained(self, step: int) -> tuple[BufferEvent, ...]:
        """The optimiser step is in a checkpoint; so are those before it."""
        if step > self._formed_step:
            raise BadInput(
                f"a checkpoint of step {step}, but the sample buffer has formed {self._formed_step} batches: give the "
                "checkpoint of this run"
            )
        events: list[BufferEvent] = []
        for one in range(self._trained_step + 1, step + 1):
            events += self._happen(BatchTrained(one))
        return tuple(events)

    def resume(self, version: PolicyVersion, *, keeps_batches: bool = True) -> tuple[BufferEvent, ...]:
        """The training goes on from a checkpoint.

        Its steps are consumed. Batches of later steps are open again, and given out unchanged; without `keeps_batches`,
        under another lineage, they are gone.

        Raises
        ------
        BadInput
            It is newer than the last batch, or older than a step of the same lineage that was trained.
        """
        if version.lineage == self._lineage:
            if version.number < self._trained_step:
                raise BadInput(
                    f"step {self._trained_step} of {self._lineage!r} was trained, and the checkpoint is of step "
                    f"{version.number}: resume it under a new lineage"
                )
            return self.trained(version.number)
        if version.lineage in self._newest_of:
            raise BadInput(f"the lineage {version.lineage!r} was left before: resume under a new one")
        events = self.trained(version.number) if version.number > self._trained_step else ()
        return (*events, *self._happen(LineageBegan(version.lineage, version.number, keeps_batches)))

    def _awaited(self, groups: Sequence[BufferedGroup]) -> tuple[str, ...]:
        """The running groups for which the next batch waits, given the groups that it could take, oldest first.

        A group of version v may be taken while n <= v + alpha. After the next batch there are v + alpha - n batches for
        the groups that are as old as that or older: of what is more, the next batch must take its share, and waits
        while too few of them have finished (the test of feasibility of earliest-deadline-first).
        """
        if not self.rule.waits_for_oldest or self.rule.bound.mode != "pace":
            return ()
        n, alpha, needed = self._formed_step, self.rule.bound.alpha, self.rule.groups
        running = {name: v for name, v in self._running.items() if n - v <= alpha}
        finished = [group.first_version for group in groups]
        for version in sorted(set(running.values())):
            as_old = [name for name, v in running.items() if v <= version]
            ready = sum(v <= version for v in finished)
            later_places = needed * (version + alpha - n)
            if ready < min(needed, ready + len(as_old) - later_places):
                return tuple(sorted(as_old))
        return ()

    def _cause_to_refuse(self, group: BufferedGroup) -> str:
        if len(group.rewards) + len(group.earlier_rewards) < FEWEST_MEMBERS or not group.rewards:
            return TOO_FEW
        if len({*group.rewards, *group.earlier_rewards}) < 2:
            return NO_VARIANCE
        return self._cause_of_age(group)

    def _cause_of_age(self, group: BufferedGroup) -> str:
        newest = self._newest_of.get(group.lineage, -1)
        if newest is not None and group.first_version > newest:
            return FOREIGN
        return "" if self.rule.bound.is_valid(self._formed_step, group.first_version) else STALE

    def _check_something_to_learn(self) -> None:
        most = self.rule.empty_draws * self.rule.groups
        if self._arrivals_without_use >= most:
            raise NothingToLearn(
                f"nothing to learn: of the last {self._arrivals_without_use} groups none had members with different "
                "rewards: use tasks of another difficulty, larger groups or a higher temperature"
            )

    def _happen(self, event: BufferEvent) -> tuple[BufferEvent, ...]:
        self._apply(event)
        return (event,)

    def _apply(self, event: BufferEvent) -> None:
        match event:
            case GroupAccepted(group):
                self._accept(group)
            case GroupDropped():
                self._drop(event)
            case BatchFormed():
                self._form(event)
            case BatchTrained(step):
                self._trained_step = step
            case LineageBegan():
                self._begin_lineage(event)

    def _accept(self, group: BufferedGroup) -> None:
        self._since[group.group_id] = self._formed_step
        self._waiting[group.group_id] = group
        self._in_use += len(group.rewards)
        whole = group.late_for or group.group_id
        self._reward(whole, group.rewards)
        if not group.late_for:
            self._arrivals_without_use = 0
        self.counts.arrived(group.environment, group.sampled_tokens)

    def _drop(self, event: GroupDropped) -> None:
        evicted = self._waiting.pop(event.group_id, None)
        if evicted is not None:
            self._in_use -= len(evicted.rewards)
        else:
            self._since[event.group_id] = self._formed_step
            whole = event.late_for or event.group_id
            self._reward(whole, event.rewards)
            self.counts.arrived(event.environment, event.sampled_tokens)
            if event.cause in (NO_VARIANCE, TOO_FEW) and not event.late_for:
                self._arrivals_without_use += 1
        self.counts.dropped(event.cause, event.sampled_tokens)

    def _reward(self, whole: str, rewards: tuple[float, ...]) -> None:
        if whole in self._since:
            self._rewards[whole] = (*self.rewards_of(whole), *rewards)

    def _form(self, batch: BatchFormed) -> None:
        groups = [self._waiting.pop(group_id) for group_id in batch.group_ids]
        self._formed[batch.step] = batch
        self._formed_step = batch.step
        self.counts.formed(batch.step, groups)
        self._forget()

    def _begin_lineage(self, began: LineageBegan) -> None:
        number = began.number
        self._newest_of = {
            name: number if newest is None else min(newest, number) for name, newest in self._newest_of.items()
        }
        self._newest_of[began.lineage] = None
        self._lineage = began.lineage
        self._trained_step = number
        if not began.keeps_batches:
            self._formed_step = number

    def _forget(self) -> None:
        """Forget groups of so long ago that what came of them now would be too old in any case."""
        past = self._formed_step - 2 * (self.rule.bound.alpha + 1)
        while self._since and next(iter(self._since.values())) < past:
            group_id = next(iter(self._since))
            del self._since[group_id]
            self._rewards.pop(group_id, None)


def _dropped(group: BufferedGroup, cause: str) -> GroupDropped:
    return GroupDropped(group.group_id, group.environment, cause, group.sampled_tokens, group.rewards, group.late_for)
