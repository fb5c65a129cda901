"""One fit on one set of rows: length distributions, label effects and boosted trees.

Nothing here is calibrated. `model` sets blend weights and shifts from the errors on held-out groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from heddle_dask.predictors.features import Finished, Floats, GroupFacts, Progress, facts_array, matrix
from heddle_dask.predictors.length_distributions import Location, ResidualDistribution, label_effects
from heddle_dask.predictors.prompt_history import (
    ATTEMPTS_KEPT,
    Expectation,
    Moment,
    PastAttempt,
    Variances,
    faded_mean,
    prompt_of,
    variances,
)
from heddle_dask.predictors.samples import Samples, has_seconds
from heddle_dask.predictors.trees import QUANTILES, TreeRows, Trees, TreeSettings, grow_trees

_SHARES = np.array(QUANTILES)[:, None]


@dataclass(frozen=True)
class LengthDistributions:
    """Distributions of the total length, which serve as fallbacks.

    Attributes
    ----------
    history_variances
        How much a history tells, and how fast it fades.
    constant, prompt, history
        Residual distributions: around the overall mean, around `location`, and around `location` moved by the
        history's mean.
    """

    location: Location
    history_variances: Variances
    constant: ResidualDistribution
    prompt: ResidualDistribution
    history: ResidualDistribution

    def expected(self, location: Floats, count: Floats, excess: Floats) -> Floats:
        """Location plus the mean excess of other attempts, shrunk by their number."""
        weight = count / (count + self.history_variances.trust)
        return np.asarray(location + np.where(count > 0, weight * np.nan_to_num(excess), 0.0))

    def log_remaining(self, location: Floats, history: Floats, known: np.ndarray, done: Floats) -> Floats:
        """Quantiles (2, n), from the group history where siblings are known, else from the prompt."""
        if known.all():
            return self.history.log_remaining(history, done, _SHARES)
        alone = self.prompt.log_remaining(location, done, _SHARES)
        if not known.any():
            return alone
        return np.where(known, self.history.log_remaining(history, done, _SHARES), alone)


@dataclass(frozen=True)
class Outlook:
    """Inputs of the length distributions for some rows; `known`: at least one sibling has finished."""

    known: npt.NDArray[np.bool_]
    steps: npt.NDArray[np.int64]
    location: Floats
    history: Floats
    done: Floats


@dataclass(frozen=True)
class Seen(Outlook):
    """Inputs of all models for some rows."""

    features: npt.NDArray[np.float32]


@dataclass(frozen=True)
class CoreModel:
    """Fitted length distributions and trees.

    Attributes
    ----------
    location_s
        Location of the log of total seconds, against which the duration of siblings is compared. None if no
        trajectory had a duration.
    labels
        Effect of each tool's label on the log of what is left.
    """

    distributions: LengthDistributions
    location_s: Location | None
    labels: dict[str, float]
    trees: Trees | None

    @cached_property
    def expected(self) -> Expectation:
        """What is expected without other attempts, and how these fade."""
        return Expectation(self.locate, self._locate_s, self.distributions.history_variances.drift)

    def locate(self, one: Progress | Finished | PastAttempt) -> float:
        """Expected log of total tokens without other attempts."""
        return self.distributions.location.of(one)

    def _locate_s(self, one: Progress | Finished | PastAttempt) -> float:
        return self.location_s.of(one) if self.location_s else 0.0

    def see(self, rows: Sequence[Progress], facts: Sequence[GroupFacts]) -> Seen:
        """Compute features and expectations."""
        told = facts_array(facts)
        return self._with_features(rows, told, self._outlook(rows, told))

    def _outlook(self, rows: Sequence[Progress], told: Floats) -> Outlook:
        count = told[:, 0]
        location = np.array([self.locate(row) for row in rows])
        return Outlook(
            known=count > 0,
            steps=np.array([row.steps_finished for row in rows], dtype=np.int64),
            location=location,
            history=self.distributions.expected(location, count, told[:, 1]),
            done=np.array([row.generated_tokens for row in rows], dtype=np.float64),
        )

    def _with_features(self, rows: Sequence[Progress], told: Floats, outlook: Outlook) -> Seen:
        features = matrix(rows, told, outlook.location, outlook.history, self.labels)
        return Seen(**vars(outlook), features=features)

    def by_distributions(self, outlook: Outlook) -> Floats:
        """Log remaining from the group history or the prompt, (2, n)."""
        return self.distributions.log_remaining(outlook.location, outlook.history, outlook.known, outlook.done)

    def by_trees(self, seen: Seen) -> Floats:
        """Log remaining from the trees, (2, n)."""
        assert self.trees is not None
        return self.trees.log_remaining(seen.features, seen.steps)


def fit_core(
    finished: Sequence[Finished], samples: Samples, use: npt.NDArray[np.bool_], settings: TreeSettings
) -> CoreModel:
    """Fit distributions on `finished` and trees on the rows in `use` (none: distributions only)."""
    distributions = fit_distributions(finished)
    timed = [one for one in finished if has_seconds(one)]
    seconds = np.array([one.duration_s for one in timed], dtype=np.float64)
    location_s = Location.fit(timed, np.log1p(seconds)) if timed else None
    core = CoreModel(distributions, location_s, {}, None)
    if not use.any():
        return core
    picked = samples.take(use)
    told = facts_array(picked.facts(core.expected))
    outlook = core._outlook(picked.rows, told)
    target = _targets(distributions, outlook, picked, settings.seed)
    labels = label_effects(picked.rows, target)
    seen = replace(core, labels=labels)._with_features(picked.rows, told, outlook)
    rows = TreeRows(seen.features, target, picked.censored, seen.steps == 0)
    return CoreModel(distributions, location_s, labels, grow_trees(rows, settings))


def fit_distributions(finished: Sequence[Finished]) -> LengthDistributions:
    totals = np.array([one.generated_tokens for one in finished], dtype=np.float64)
    logs = np.log1p(totals)
    censored = np.array([one.censored for one in finished], dtype=bool)
    location = Location.fit(finished, logs)
    expected = np.array([location.of(one) for one in finished])
    above = logs - expected
    pairs = zip(finished, above.tolist(), strict=True)
    differences = variances((one, value) for one, value in pairs if not one.censored)
    others, counts = _others_mean(finished, location, differences)
    moved = expected + counts / (counts + differences.trust) * others
    told = counts > 0 if counts.any() else np.ones(len(logs), dtype=bool)
    return LengthDistributions(
        location=location,
        history_variances=differences,
        constant=ResidualDistribution.fit(logs - location.overall, censored),
        prompt=ResidualDistribution.fit(above, censored),
        history=ResidualDistribution.fit((logs - moved)[told], censored[told]),
    )


def _others_mean(finished: Sequence[Finished], location: Location, differences: Variances) -> tuple[Floats, Floats]:
    """Per trajectory: mean excess of the other attempts at its prompt, and their number; 0 and 0 without any."""
    prompts: dict[str, list[tuple[Finished, float]]] = {}
    for one in finished:
        pair = (one, math.log1p(one.generated_tokens) - location.of(one))
        prompts.setdefault(prompt_of(one), []).append(pair)
    means, counts = np.zeros(len(finished)), np.zeros(len(finished))
    for index, one in enumerate(finished):
        others = [pair for pair in prompts[prompt_of(one)][-ATTEMPTS_KEPT - 1 :] if pair[0] is not one]
        now = Moment(one.policy_version, one.lineage, one.run)
        _, counts[index], means[index] = faded_mean(others, now, differences.drift)
    return means, counts


def _targets(distributions: LengthDistributions, outlook: Outlook, samples: Samples, seed: int) -> Floats:
    """Log of the tokens left; a censored trajectory gets one draw from the distribution beyond its known length."""
    total, censored = samples.total, samples.censored
    if censored.any():
        # One draw per trajectory, the same for all its rows.
        draws = np.random.default_rng(seed).random(len(samples.owners))
        first: dict[str, int] = {}
        for index, owner in enumerate(samples.owners):
            draws[index] = draws[first.setdefault(owner.trajectory_id, index)]
        alone = distributions.prompt.log_remaining(outlook.location, total, draws)
        told = distributions.history.log_remaining(outlook.history, total, draws)
        extra = np.expm1(np.where(outlook.known, told, alone))
        total = np.where(censored, total + extra, total)
    return np.asarray(np.log1p(np.maximum(total - samples.done, 1.0)))
