"""One fit on one set of rows: laws, label effects and boosted trees, for tokens and for seconds.

Nothing here is calibrated; `model` blends and shifts by what this predicts of groups it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle_dask.predictors.features import Finished, Floats, GroupFacts, Progress, facts_array, matrix
from heddle_dask.predictors.length_distributions import Location, ResidualLaw, history_trust, label_effects
from heddle_dask.predictors.samples import Samples, has_seconds
from heddle_dask.predictors.trees import QUANTILES, TreeRows, Trees, TreeSettings, grow_trees

_SHARES = np.array(QUANTILES)[:, None]


@dataclass(frozen=True)
class Laws:
    """The fallbacks for one target.

    Attributes
    ----------
    trust
        Siblings that a group's mean needs to be half believed.
    constant, prompt, history
        What is left unexplained by nothing, by `location`, and by `location` with the group's mean.
    """

    location: Location
    trust: float
    constant: ResidualLaw
    prompt: ResidualLaw
    history: ResidualLaw

    def expected(self, location: Floats, count: Floats, excess: Floats) -> Floats:
        """Location moved by the siblings' mean excess, as far as their number deserves."""
        weight = count / (count + self.trust)
        return np.asarray(location + np.where(count > 0, weight * np.nan_to_num(excess), 0.0))

    def log_remaining(self, location: Floats, history: Floats, known: np.ndarray, done: Floats) -> Floats:
        """Quantiles (2, n) by group history where siblings are known, else by the prompt."""
        if known.all():
            return self.history.log_remaining(history, done, _SHARES)
        alone = self.prompt.log_remaining(location, done, _SHARES)
        if not known.any():
            return alone
        return np.where(known, self.history.log_remaining(history, done, _SHARES), alone)


@dataclass(frozen=True)
class Seen:
    """What the models look at for some rows; `known` = at least one sibling has finished."""

    features: npt.NDArray[np.float32]
    known: npt.NDArray[np.bool_]
    steps: npt.NDArray[np.int64]
    location: tuple[Floats, Floats]
    history: tuple[Floats, Floats]
    done: tuple[Floats, Floats]


@dataclass(frozen=True)
class CoreModel:
    """Laws and trees as fitted; entry 0 is tokens, entry 1 seconds (None if no trajectory had a duration)."""

    laws: tuple[Laws, Laws | None]
    labels: dict[str, float]
    trees: tuple[Trees | None, Trees | None]

    def locate(self, one: Progress | Finished) -> float:
        """Expected log of total tokens without siblings."""
        return self.laws[0].location.of(one)

    def locate_s(self, one: Progress | Finished) -> float:
        """Expected log of total seconds without siblings; 0 when seconds are not known."""
        return self.laws[1].location.of(one) if self.laws[1] else 0.0

    def see(self, rows: Sequence[Progress], facts: Sequence[GroupFacts]) -> Seen:
        """Compute features and expectations."""
        told = facts_array(facts)
        count = told[:, 0]
        location = np.array([self.locate(row) for row in rows])
        history = self.laws[0].expected(location, count, told[:, 1])
        done = np.array([row.generated_tokens for row in rows], dtype=np.float64)
        location_s = history_s = done_s = location
        if self.laws[1]:
            location_s = np.array([self.locate_s(row) for row in rows])
            history_s = self.laws[1].expected(location_s, count, told[:, 5])
            done_s = np.nan_to_num(np.array([row.elapsed_s for row in rows]))
        return Seen(
            features=matrix(rows, told, location, history, self.labels),
            known=count > 0,
            steps=np.array([row.steps_finished for row in rows], dtype=np.int64),
            location=(location, location_s),
            history=(history, history_s),
            done=(done, done_s),
        )

    def by_laws(self, seen: Seen, target: int) -> Floats:
        """Log remaining by group history or prompt, (2, n)."""
        laws = self.laws[target]
        assert laws is not None
        return laws.log_remaining(seen.location[target], seen.history[target], seen.known, seen.done[target])

    def by_trees(self, seen: Seen, target: int) -> Floats:
        """Log remaining by the trees, (2, n)."""
        trees = self.trees[target]
        assert trees is not None
        return trees.log_remaining(seen.features, seen.steps)


def fit_core(
    finished: Sequence[Finished], samples: Samples, use: npt.NDArray[np.bool_], settings: TreeSettings
) -> CoreModel:
    """Fit laws on `finished` and trees on the rows in `use` (none: laws only)."""
    laws = fit_laws(finished, seconds=False)
    timed = [one for one in finished if has_seconds(one)]
    both = (laws, fit_laws(timed, seconds=True) if timed else None)
    core = CoreModel(both, {}, (None, None))
    if not use.any():
        return core
    picked = samples.take(use)
    facts = picked.facts(core.locate, core.locate_s)
    plain = core.see(picked.rows, facts)
    target = _targets(core, plain, picked, 0, settings.seed)
    labels = label_effects(picked.rows, target)
    core = CoreModel(both, labels, (None, None))
    seen = core.see(picked.rows, facts)
    rows = TreeRows(seen.features, target, picked.censored, seen.steps == 0)
    trees = grow_trees(rows, settings, settings.rounds, settings.start_rounds)
    trees_s = None
    if both[1]:
        teach = np.array([has_seconds(owner) for owner in picked.owners])
        target_s = _targets(core, seen, picked, 1, settings.seed)
        rows_s = TreeRows(seen.features, target_s, picked.censored, seen.steps == 0).take(teach)
        trees_s = grow_trees(rows_s, settings, settings.rounds_s)
    return CoreModel(both, labels, (trees, trees_s))


def fit_laws(finished: Sequence[Finished], *, seconds: bool) -> Laws:
    """Fit the fallbacks on at least one trajectory."""
    totals = np.array(
        [one.duration_s if seconds else one.generated_tokens for one in finished], dtype=np.float64
    )
    logs = np.log1p(totals)
    censored = np.array([one.censored for one in finished], dtype=bool)
    location = Location.fit(finished, logs)
    expected = np.array([location.of(one) for one in finished])
    above = logs - expected
    whole = [
        (one.group_id, value) for one, value in zip(finished, above.tolist(), strict=True) if not one.censored
    ]
    trust = history_trust(whole)
    others, counts = _others_mean(finished, above)
    moved = expected + np.where(counts > 0, counts / (counts + trust) * others, 0.0)
    told = counts > 0 if counts.any() else np.ones(len(logs), dtype=bool)
    return Laws(
        location=location,
        trust=trust,
        constant=ResidualLaw.fit(logs - location.overall, censored),
        prompt=ResidualLaw.fit(above, censored),
        history=ResidualLaw.fit((logs - moved)[told], censored[told]),
    )


def _others_mean(finished: Sequence[Finished], above: Floats) -> tuple[Floats, Floats]:
    """Mean excess of the other complete members of each one's group, and their number."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for one, value in zip(finished, above.tolist(), strict=True):
        if not one.censored:
            sums[one.group_id] = sums.get(one.group_id, 0.0) + value
            counts[one.group_id] = counts.get(one.group_id, 0) + 1
    means, others = np.zeros(len(finished)), np.zeros(len(finished))
    for index, one in enumerate(finished):
        count = counts.get(one.group_id, 0) - (not one.censored)
        if count > 0:
            own = 0.0 if one.censored else float(above[index])
            means[index], others[index] = (sums[one.group_id] - own) / count, count
    return means, others


def _targets(core: CoreModel, seen: Seen, samples: Samples, target: int, seed: int) -> Floats:
    """Log of what was left; a censored trajectory gets one draw of the law, given how long it already was."""
    laws = core.laws[target]
    assert laws is not None
    total, censored = samples.total(bool(target)), samples.censored
    if censored.any():
        # One draw per trajectory, the same for all its rows.
        draws = np.random.default_rng(seed).random(len(samples.owners))
        first: dict[str, int] = {}
        for index, owner in enumerate(samples.owners):
            draws[index] = draws[first.setdefault(owner.trajectory_id, index)]
        alone = laws.prompt.log_remaining(seen.location[target], total, draws)
        told = laws.history.log_remaining(seen.history[target], total, draws)
        extra = np.expm1(np.where(seen.known, told, alone))
        total = np.where(censored, total + extra, total)
    return np.asarray(np.log1p(np.maximum(total - samples.done(bool(target)), 1.0)))
