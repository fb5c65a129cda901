"""A fitted model: trees blended with the laws by what held-back groups say, and shifted so that q90 covers.

Immutable once fitted. Below `TREES_FROM` complete trajectories it answers from group history, the prompt, or a
constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle_dask.core.prediction import Prediction
from heddle_dask.predictors.core_model import CoreModel, Seen, fit_core
from heddle_dask.predictors.features import Finished, Floats, GroupFacts, Progress
from heddle_dask.predictors.length_distributions import ResidualLaw
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
    """Per (siblings known, bucket): the laws' weight in the blend, and the shift of the 0.9 quantile (in logs)."""

    weight: Floats
    shift: Floats


@dataclass(frozen=True)
class Model:
    """See the module. `finished` = complete trajectories it has learnt from."""

    core: CoreModel
    calibration: Calibration | None
    finished: int

    def predict(self, rows: Sequence[Progress], facts: Sequence[GroupFacts]) -> list[Prediction]:
        """One prediction per row; `facts` are of the siblings, as known now."""
        if not rows:
            return []
        seen = self.core.see(rows, facts)
        tokens = np.maximum(np.expm1(self.log_remaining(seen)), 1.0)
        return [Prediction(*values) for values in zip(*tokens.tolist(), self._sources(seen), strict=True)]

    def log_remaining(self, seen: Seen) -> Floats:
        """Median and 0.9 quantile of log(1 + what is left), (2, n)."""
        if self.calibration is None or self.core.trees is None:
            return self._fallback(seen)
        # The laws come before the trees: those leave nothing else in the processor's cache.
        by_laws = self.core.by_laws(seen)
        cell = (seen.known.astype(np.int64), np.searchsorted(BUCKETS, seen.steps, side="right") - 1)
        weight = self.calibration.weight[cell]
        both = (1.0 - weight) * self.core.by_trees(seen) + weight * by_laws
        both[1] = np.maximum(both[0], both[1] + self.calibration.shift[cell])
        return both

    def _fallback(self, seen: Seen) -> Floats:
        laws = self.core.laws
        shares = np.array([[0.5], [0.9]])
        constant = laws.constant.log_remaining(np.array(laws.location.overall), seen.done, shares)
        if self.finished < HISTORY_FROM:
            return constant
        by_laws = self.core.by_laws(seen)
        if self.finished >= PROMPT_FROM:
            return by_laws
        return np.where(seen.known, by_laws, constant)

    def _sources(self, seen: Seen) -> list[str]:
        if self.calibration is not None and self.core.trees is not None:
            return ["xgboost"] * len(seen.steps)
        alone = "prompt only" if self.finished >= PROMPT_FROM else "constant"
        told = "group history" if self.finished >= HISTORY_FROM else "constant"
        return [told if known else alone for known in seen.known.tolist()]


def fit_model(finished: Sequence[Finished], settings: TreeSettings) -> Model | None:
    """Fit on trajectories, complete and censored; None if none is complete. Slow: seconds.

    Trees are fitted `settings.folds` times on all groups but one part, which earns the weights and shifts, and
    once on all.
    """
    complete = sum(not one.censored for one in finished)
    if not complete:
        return None
    samples = make_samples(finished, max_rows=settings.max_rows, folds=settings.folds, seed=settings.seed)
    grown = complete >= TREES_FROM
    use = np.full(len(samples.rows), grown)
    core = fit_core(finished, samples, use, settings)
    if core.trees is None:
        return Model(core, None, complete)
    return Model(core, _calibrate(_held_back(finished, samples, settings)), complete)


@dataclass(frozen=True)
class _Held:
    """Predictions for one part of the groups by a model that has not seen it, and what came true."""

    known: npt.NDArray[np.bool_]
    steps: npt.NDArray[np.int64]
    censored: npt.NDArray[np.bool_]
    trees: Floats
    laws: Floats
    truth: Floats


def _held_back(finished: Sequence[Finished], samples: Samples, settings: TreeSettings) -> list[_Held]:
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
        seen = core.see(told.rows, told.facts(core.locate, core.locate_s))
        parts.append(
            _Held(
                known=seen.known,
                steps=seen.steps,
                censored=told.censored,
                trees=core.by_trees(seen),
                laws=core.by_laws(seen),
                truth=np.log1p(np.maximum(told.total - told.done, 1.0)),
            )
        )
    return parts


def _outside(finished: Sequence[Finished], samples: Samples, inside: npt.NDArray[np.bool_]) -> list[Finished]:
    """The trajectories that share nothing with the rows held back."""
    held = [owner for owner, use in zip(samples.owners, inside.tolist(), strict=True) if not use]
    if samples.by_group:
        groups = {owner.group_id for owner in held}
        return [one for one in finished if one.group_id not in groups]
    names = {owner.trajectory_id for owner in held}
    return [one for one in finished if one.trajectory_id not in names]


def _calibrate(parts: Sequence[_Held]) -> Calibration | None:
    """Weights by least absolute error, then the shift by split conformal; small cells borrow from larger ones."""
    if not parts:
        return None
    trees = np.concatenate([part.trees for part in parts], axis=1)
    laws = np.concatenate([part.laws for part in parts], axis=1)
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
                (1 - WEIGHTS[:, None]) * trees[0, whole] + WEIGHTS[:, None] * laws[0, whole] - truth[whole]
            )
            # Where all are cut off nothing tells which is nearer: the trees.
            best = float(WEIGHTS[int(np.argmin(errors.mean(axis=1)))]) if whole.any() else float(WEIGHTS[0])
            above = truth[cell] - (1 - best) * trees[1, cell] - best * laws[1, cell]
            weight[told, number] = best
            shift[told, number] = _quantile(above, censored[cell])
    return Calibration(weight, shift)


def _cell(side: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """The rows of a cell, widened over neighbouring decision points, then over both sides, until it is full."""
    for rows in (side, np.ones_like(side)):
        for width in range(len(BUCKETS)):
            cell = rows & (distance <= width)
            if cell.sum() >= MIN_BUCKET_ROWS:
                return np.asarray(cell)
    return np.ones_like(side)


def _quantile(above: Floats, censored: npt.NDArray[np.bool_]) -> float:
    """The 0.9 quantile with the conformal correction.

    Half way between that of the complete rows and that of all rows with censored ones as lower bounds: the first
    is too low where long ones are cut off more often, the second too high where what is cut off was near its end.
    """
    level = min(0.9 * (1 + 1 / len(above)), 0.99)
    both = float(ResidualLaw.fit(above, censored).quantile(np.array([1 - level]))[0])
    whole = above[~censored]
    return (both + float(np.quantile(whole, level))) / 2 if len(whole) else both
