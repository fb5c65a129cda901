"""Facts about other attempts at a trajectory's prompt: now (`GroupBook`), and at a past moment (`facts_then`).

An attempt counts as ended only if it had ended by the moment of the prediction. All such facts are made here, so that
no prediction can use the future.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.predictors.features import Finished, GroupFacts, Progress
from heddle_dask.predictors.prompt_history import (
    ATTEMPTS_KEPT,
    Expectation,
    Moment,
    PastAttempt,
    PromptHistory,
    ended_facts,
    prompt_of,
)


@dataclass(frozen=True, slots=True)
class RunningSiblings:
    """Siblings that still run: their number, and logarithms of their mean and largest tokens so far."""

    count: int
    mean: float
    largest: float

    @classmethod
    def of(cls, lengths: Sequence[int]) -> RunningSiblings | None:
        """None without siblings."""
        if not lengths:
            return None
        return cls(len(lengths), math.log1p(sum(lengths) / len(lengths)), math.log1p(max(lengths)))


@dataclass(frozen=True, slots=True)
class KnownThen:
    """The other attempts at a row's prompt that had ended by then, oldest first, and those that still ran."""

    ended: tuple[Finished, ...]
    now: Moment
    running: RunningSiblings | None = None

    @property
    def key(self) -> tuple[Moment, tuple[int, ...]]:
        """Equal for equal facts about ended attempts, while these exist: rows of one prompt share most of them."""
        return self.now, tuple([id(each) for each in self.ended])

    def ended_facts(self, expected: Expectation) -> GroupFacts:
        """Facts about the ended attempts alone."""
        return ended_facts(self.ended, self.now, expected)


def known_then(row: Progress, members: Sequence[Finished], run: int = 0) -> KnownThen:
    """What was known at `row.at_s` in `run`.

    `members` are the attempts at the prompt, this one included, in the order in which they were observed. Those of
    earlier runs had ended. Of this run those without clocks count as earlier runs too.
    """
    others = [each for each in members if each.trajectory_id != row.trajectory_id or each.run != run]
    now = Moment(row.policy_version, row.lineage, run)
    if math.isnan(row.at_s):
        ended = [
            each for each in others if each.run < run or (each.run == run and math.isnan(each.ended_at_s))
        ]
        return KnownThen(tuple(ended[-ATTEMPTS_KEPT:]), now)
    earlier = [each for each in others if each.run < run]
    beside = [each for each in others if each.run == run]
    ended = sorted((each for each in beside if each.ended_at_s <= row.at_s), key=lambda each: each.ended_at_s)
    lengths = [
        _generated_by(each, row.at_s)
        for each in beside
        if each.group_id == row.group_id and each.started_at_s <= row.at_s < each.ended_at_s
    ]
    return KnownThen(tuple([*earlier, *ended][-ATTEMPTS_KEPT:]), now, RunningSiblings.of(lengths))


def facts_then(row: Progress, members: Sequence[Finished], expected: Expectation, run: int = 0) -> GroupFacts:
    """Facts as known at `row.at_s` in `run`; `members` as in `known_then`."""
    known = known_then(row, members, run)
    return with_running(known.ended_facts(expected), known.running)


def _generated_by(sibling: Finished, at_s: float) -> int:
    """Known tokens of a sibling at `at_s`: those of its last decision point before that time."""
    return max([point.generated_tokens for point in sibling.points if point.at_s <= at_s], default=0)


def with_running(facts: GroupFacts, running: RunningSiblings | None) -> GroupFacts:
    """Facts about ended attempts, and siblings that still run."""
    if running is None:
        return facts
    return facts._replace(running=running.count, running_mean=running.mean, running_largest=running.largest)


class GroupBook:
    """Ended attempts at all prompts, and the running siblings of each group.

    Attributes
    ----------
    run
        Number of the present run.
    """

    def __init__(self) -> None:
        self.history = PromptHistory()
        self.run = 0
        self._running: dict[str, dict[str, int]] = {}

    def finish(self, one: Finished) -> None:
        """Record the end of a trajectory."""
        self._end_running(one.group_id, one.trajectory_id)
        self.history.add(prompt_of(one), PastAttempt.of(one))

    def running(self, progress: Progress) -> None:
        """Record the tokens of a running trajectory."""
        group = self._running.setdefault(progress.group_id, {})
        group[progress.trajectory_id] = progress.generated_tokens

    def _end_running(self, group_id: str, trajectory_id: str) -> None:
        group = self._running.get(group_id, {})
        group.pop(trajectory_id, None)
        if not group:
            self._running.pop(group_id, None)

    def facts(self, row: Progress, expected: Expectation) -> GroupFacts:
        """Facts as known now."""
        now = Moment(row.policy_version, row.lineage, self.run)
        facts = self.history.facts(prompt_of(row), now, expected)
        running = self._running.get(row.group_id)
        if not running or (len(running) == 1 and row.trajectory_id in running):
            return facts
        lengths = [tokens for name, tokens in running.items() if name != row.trajectory_id]
        return with_running(facts, RunningSiblings.of(lengths))
