"""Training rows from trajectories: decision points with the facts known then and the future that followed.

An attempt at a prompt counts as ended only if it had ended by the moment of the prediction: now (`GroupBook`), or at a
past moment (`facts_then`). All such facts are made here, so that no prediction can use the future.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle_dask.predictors.features import NO_SIBLINGS, Finished, Floats, GroupFacts, Progress
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
        ended = [each for each in others if each.run < run or (each.run == run and math.isnan(each.ended_at_s))]
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
    """Ended attempts at all prompts, and the running siblings of each group."""

    def __init__(self) -> None:
        self.history = PromptHistory()
        self.run = 0
        self._running: dict[str, dict[str, int]] = {}

    def finish(self, one: Finished) -> None:
        self._end_running(one.group_id, one.trajectory_id)
        self.history.add(prompt_of(one), PastAttempt.of(one))

    def running(self, progress: Progress) -> None:
        group = self._running.setdefault(progress.group_id, {})
        group[progress.trajectory_id] = progress.generated_tokens

    def _end_running(self, group_id: str, trajectory_id: str) -> None:
        group = self._running.get(group_id, {})
        group.pop(trajectory_id, None)
        if not group:
            self._running.pop(group_id, None)

    def facts(self, row: Progress, expected: Expectation) -> GroupFacts:
        now = Moment(row.policy_version, row.lineage, self.run)
        facts = self.history.facts(prompt_of(row), now, expected)
        running = self._running.get(row.group_id)
        if not running or (len(running) == 1 and row.trajectory_id in running):
            return facts
        lengths = [tokens for name, tokens in running.items() if name != row.trajectory_id]
        return with_running(facts, RunningSiblings.of(lengths))


# Numbers of finished steps whose decision points become rows; later points in between differ little.
LEARNT_STEPS = frozenset({0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 65, 80, 100, 130, 160, 200})


@dataclass(frozen=True)
class Samples:
    """Parallel columns, one entry per decision point.

    Attributes
    ----------
    owners
        The trajectory of each row. It holds the row's future and must never be an input of a model.
    known
        What was known of other attempts at each row; None: the row is given none.
    fold
        The part of the prompts (of the trajectories, unless `by_prompt`) that the row belongs to.
    """

    rows: tuple[Progress, ...]
    owners: tuple[Finished, ...]
    known: tuple[KnownThen | None, ...]
    fold: npt.NDArray[np.int64]
    by_prompt: bool

    def take(self, use: npt.NDArray[np.bool_]) -> Samples:
        picked = np.flatnonzero(use).tolist()
        return Samples(
            rows=tuple(self.rows[index] for index in picked),
            owners=tuple(self.owners[index] for index in picked),
            known=tuple(self.known[index] for index in picked),
            fold=self.fold[use],
            by_prompt=self.by_prompt,
        )

    def facts(self, expected: Expectation) -> list[GroupFacts]:
        """Facts about other attempts as known at each row."""
        told: dict[object, GroupFacts] = {}
        made = []
        for known in self.known:
            if known is None:
                made.append(NO_SIBLINGS)
                continue
            key = known.key
            facts = told.get(key)
            if facts is None:
                facts = told[key] = known.ended_facts(expected)
            made.append(with_running(facts, known.running))
        return made

    @property
    def censored(self) -> npt.NDArray[np.bool_]:
        """True for rows of which only part of the future is known."""
        return np.array([owner.censored for owner in self.owners], dtype=bool)

    @property
    def done(self) -> Floats:
        """Tokens generated before each row."""
        return np.array([row.generated_tokens for row in self.rows], dtype=np.float64)

    @property
    def total(self) -> Floats:
        """Tokens of the whole trajectory of each row; a lower bound if censored."""
        return np.array([owner.generated_tokens for owner in self.owners], dtype=np.float64)


def fold_numbers(names: Iterable[str], folds: int, seed: int) -> dict[str, int]:
    """Assign names to parts of equal size at random: the same in every process and for every order of the names."""
    dealt = sorted(set(names), key=lambda name: (zlib.crc32(f"{seed}|{name}".encode()), name))
    return {name: index % folds for index, name in enumerate(dealt)}


def make_samples(finished: Sequence[Finished], *, max_rows: int, folds: int, seed: int) -> Samples:
    """Cut trajectories into rows; above `max_rows`, a seeded share of the rows is kept.

    Rows with other attempts at their prompt come twice, with and without them, so that one model serves both. With
    hardly any prompts, the parts are of trajectories instead.
    """
    members: dict[str, list[Finished]] = {}
    for one in finished:
        members.setdefault(prompt_of(one), []).append(one)
    pairs = [
        (point, one, cold)
        for one in finished
        for point in one.points
        if point.steps_finished in LEARNT_STEPS and point.generated_tokens < one.generated_tokens
        for cold in ((False, True) if len(members[prompt_of(one)]) > 1 else (False,))
    ]
    if len(pairs) > max_rows:
        kept = np.random.default_rng(seed).choice(len(pairs), size=max_rows, replace=False)
        pairs = [pairs[index] for index in np.sort(kept).tolist()]
    several = len(members) >= 2 * folds
    names = [prompt_of(one) if several else one.trajectory_id for _, one, _ in pairs]
    part = fold_numbers(names, folds, seed)
    return Samples(
        rows=tuple(point for point, _, _ in pairs),
        owners=tuple(one for _, one, _ in pairs),
        known=tuple(
            None if cold else known_then(point, members[prompt_of(one)], one.run) for point, one, cold in pairs
        ),
        fold=np.array([part[name] for name in names], dtype=np.int64),
        by_prompt=several,
    )


def has_seconds(one: Finished) -> bool:
    """Whether the trajectory has a measured duration."""
    return not math.isnan(one.duration_s) and all(not math.isnan(point.elapsed_s) for point in one.points)
