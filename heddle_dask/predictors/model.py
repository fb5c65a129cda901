"""A fitted model: trees blended with length distributions, and a calibrated 0.9 quantile.

Held-out groups give the blend weights, and the shift with which q90 has its coverage.

Immutable once fitted. Below `TREES_FROM` complete trajectories it answers from group history, the prompt, or a
constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle_dask.predictors.core_model import CoreModel, Seen, fit_core
from heddle_dask.predictors.features import Finished, Floats, GroupFacts, Progress
from heddle_dask.predictors.length_distributions import ResidualDistribution
from heddle_dask.predictors.prompt_history import prompt_of, ratio_trust
from heddle_dask.predictors.samples import Samples, make_samples
from heddle_dask.predictors.trees import TreeSettings

HISTORY_FROM = 5
PROMPT_FROM = 20
TREES_FROM = 60
# Decision points that share a blend weight and a shift begin at these numbers of finished steps.
BUCKETS = np.array([0, 1, 2, 3, 5, 8, 13, 21])
MIN_BUCKET_ROWS = 60
WEIGHTS = np.linspace(0.0, 1.0, 11)


@dataclass(frozen=True)
class Calibration:
    """Per (siblings known, bucket): blend weight of the distributions, and shift of the 0.9 quantile (in logs)."""

    weight: Floats
    shift: Floats


@dataclass(frozen=True)
class Model:
    """See the module. `finished`: complete trajectories in the training data; `ratio_trust`: see that function."""

    core: CoreModel
    calibration: Calibration | None
    finished: int
    ratio_trust: float = math.inf

    def quantiles(self, rows: Sequence[Progress], facts: Sequence[GroupFacts]) -> list[tuple[float, float, str]]:
        """Median, 0.9 quantile and source of each row; `facts` are the group facts as known now."""
        if not rows:
            return []
        seen = self.core.see(rows, facts)
        tokens = np.maximum(np.expm1(self.log_remaining(seen)), 1.0)
        return list(zip(*tokens.tolist(), self._sources(seen), strict=True))

    def log_remaining(self, seen: Seen) -> Floats:
        """Median and 0.9 quantile of log(1 + tokens left), (2, n)."""
        if self.calibration is None or self.core.trees is None:
            return self._fallback(seen)
        # The distributions come before the trees, which evict everything else from the processor's cache.
        by_distributions = self.core.by_distributions(seen)
        cell = (seen.known.astype(np.int64), np.searchsorted(BUCKETS, seen.steps, side="right") - 1)
        weight = self.calibration.weight[cell]
        both = (1.0 - weight) * self.core.by_trees(seen) + weight * by_distributions
        both[1] = np.maximum(both[0], both[1] + self.calibration.shift[cell])
        return both

    def _fallback(self, seen: Seen) -> Floats:
        distributions = self.core.distributions
        shares = np.array([[0.5], [0.9]])
        constant = distributions.constant.log_remaining(np.array(distributions.location.overall), seen.done, shares)
        if self.finished < HISTORY_FROM:
            return constant
        by_distributions = self.core.by_distributions(seen)
        if self.finished >= PROMPT_FROM:
            return by_distributions
        return np.where(seen.known, by_distributions, constant)

    def _sources(self, seen: Seen) -> list[str]:
        if self.calibration is not None and self.core.trees is not None:
            return ["xgboost"] * len(seen.steps)
        alone = "prompt only" if self.finished >= PROMPT_FROM else "constant"
        told = "group history" if self.finished >= HISTORY_FROM else "constant"
        return [told if known else alone for known in seen.known.tolist()]


def fit_model(finished: Sequence[Finished], settings: TreeSettings) -> Model | None:
    """Fit on complete and censored trajectories; None if none is complete. Takes seconds.

    Trees are fitted `settings.folds` times without one part of the groups, which gives weights and shifts, and once
    on all groups.
    """
    complete = sum(not one.censored for one in finished)
    if not complete:
        return None
    samples = make_samples(finished, max_rows=settings.max_rows, folds=settings.folds, seed=settings.seed)
    trust = ratio_trust(finished)
    grown = complete >= TREES_FROM
    use = np.full(len(samples.rows), grown)
    core = fit_core(finished, samples, use, settings)
    if core.trees is None:
        return Model(core, None, complete, trust)
    core.trees.prepare()
    return Model(core, _calibrate(_held_out(finished, samples, settings)), complete, trust)


@dataclass(frozen=True)
class _HeldOutRows:
    """Predictions for one part of the groups by a model fitted without it, and the truth."""

    known: npt.NDArray[np.bool_]
    steps: npt.NDArray[np.int64]
    censored: npt.NDArray[np.bool_]
    trees: Floats
    distributions: Floats
    truth: Floats


def _held_out(finished: Sequence[Finished], samples: Samples, settings: TreeSettings) -> list[_HeldOutRows]:
    parts = []
    for fold in range(settings.folds):
        inside = samples.fold != fold
        learnt = _outside(finished, samples, inside)
        if inside.all() or not any(not one.censored for one in learnt):
            continue
        core = fit_core(learnt, samples, inside, settings)
        if core.trees is None:
            continue
        told = samples.take(~inside)
        seen = core.see(told.rows, told.facts(core.expected))
        parts.append(
            _HeldOutRows(
                known=seen.known,
                steps=seen.steps,
                censored=told.censored,
                trees=core.by_trees(seen),
                distributions=core.by_distributions(seen),
                truth=np.log1p(np.maximum(told.total - told.done, 1.0)),
            )
        )
    return parts


def _outside(finished: Sequence[Finished], samples: Samples, inside: npt.NDArray[np.bool_]) -> list[Finished]:
    """The trajectories that share no prompt (or trajectory) with the held-out rows."""
    held = [owner for owner, use in zip(samples.owners, inside.tolist(), strict=True) if not use]
    if samples.by_prompt:
        prompts = {prompt_of(owner) for owner in held}
        return [one for one in finished if prompt_of(one) not in prompts]
    names = {owner.trajectory_id for owner in held}
    return [one for one in finished if one.trajectory_id not in names]


def _calibrate(parts: Sequence[_HeldOutRows]) -> Calibration | None:
    """Weights by least absolute error, then shifts by split conformal prediction; small cells are widened."""
    if not parts:
        return None
    trees = np.concatenate([part.trees for part in parts], axis=1)
    distributions = np.concatenate([part.distributions for part in parts], axis=1)
    truth = np.concatenate([part.truth for part in parts])
    known = np.concatenate([part.known for part in parts])
    censored = np.concatenate([part.censored for part in parts])
    bucket = np.searchsorted(BUCKETS, np.concatenate([part.steps for part in parts]), side="right") - 1
    if len(truth) < MIN_BUCKET_ROWS:
        return None
    weight, shift = np.zeros((2, len(BUCKETS))), np.zeros((2, len(BUCKETS)))
    for told in (0, 1):
        for number in range(len(BUCKETS)):
            cell = _cell(known == bool(told), np.abs(bucket - number))
            whole = cell & ~censored
            errors = np.abs(
                (1 - WEIGHTS[:, None]) * trees[0, whole] + WEIGHTS[:, None] * distributions[0, whole] - truth[whole]
            )
            # Without a complete row the errors cannot be compared: use the trees.
            best = float(WEIGHTS[int(np.argmin(errors.mean(axis=1)))]) if whole.any() else float(WEIGHTS[0])
            above = truth[cell] - (1 - best) * trees[1, cell] - best * distributions[1, cell]
            weight[told, number] = best
            shift[told, number] = _quantile(above, censored[cell])
    return Calibration(weight, shift)


def _cell(side: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """Rows of a cell, widened over neighbouring buckets, then over both sides, to at least `MIN_BUCKET_ROWS`."""
    for rows in (side, np.ones_like(side)):
        for width in range(len(BUCKETS)):
            cell = rows & (distance <= width)
            if cell.sum() >= MIN_BUCKET_ROWS:
                return np.asarray(cell)
    return np.ones_like(side)


def _quantile(above: Floats, censored: npt.NDArray[np.bool_]) -> float:
    """The 0.9 quantile with the conformal correction.

    The mean of the quantile of complete rows and that of all rows with censored ones as lower bounds. The first is
    too low if long trajectories are cut off more often, the second too high if trajectories are cut off near their
    end.
    """
    level = min(0.9 * (1 + 1 / len(above)), 0.99)
    both = float(ResidualDistribution.fit(above, censored).quantile(np.array([1 - level]))[0])
    whole = above[~censored]
    return (both + float(np.quantile(whole, level))) / 2 if len(whole) else both
