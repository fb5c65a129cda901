"""Training rows from trajectories: decision points with the facts known then and the future that followed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle_dask.predictors.features import NO_SIBLINGS, Finished, Floats, GroupFacts, Progress
from heddle_dask.predictors.groups import KnownThen, known_then, with_running
from heddle_dask.predictors.prompt_history import Expectation, prompt_of

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
        """Only the rows in `use`."""
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
            None if cold else known_then(point, members[prompt_of(one)], one.run)
            for point, one, cold in pairs
        ),
        fold=np.array([part[name] for name in names], dtype=np.int64),
        by_prompt=several,
    )


def has_seconds(one: Finished) -> bool:
    """Whether the trajectory has a measured duration."""
    return not math.isnan(one.duration_s) and all(not math.isnan(point.elapsed_s) for point in one.points)
