"""A fitted model: trees blended with the laws by what held-back groups say, and shifted so that q90 covers.

Immutable once fitted. Below `TREES_FROM` complete trajectories it answers from group history, the prompt, or a
constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle_dask.predictors.contract import Prediction
from heddle_dask.predictors.core_model import CoreModel, Seen, fit_core
from heddle_dask.predictors.features import NAN, Finished, Floats, GroupFacts, Progress
from heddle_dask.predictors.length_distributions import ResidualLaw
from heddle_dask.predictors.samples import Samples, has_seconds, make_samples
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
    calibration: tuple[Calibration | None, Calibration | None]
    finished: int

    def predict(self, rows: Sequence[Progress], facts: Sequence[GroupFacts]) -> list[Prediction]:
        """One prediction per row; `facts` are of the siblings, as known now."""
        if not rows:
            return []
        seen = self.core.see(rows, facts)
        left, left_s = self.log_remaining(seen)
        tokens = np.maximum(np.expm1(left), 1.0)
        seconds = np.full(tokens.shape, NAN) if left_s is None else np.maximum(np.expm1(left_s), 0.0)
        sources = self._sources(seen)
        return [
            Prediction(*values) for values in zip(*tokens.tolist(), *seconds.tolist(), sources, strict=True)
        ]

    def log_remaining(self, seen: Seen) -> tuple[Floats, Floats | None]:
        """Median and 0.9 quantile of log(1 + what is left), (2, n), of tokens and of seconds.

        None where seconds are not known.
        """
        targets = (0,) if self.core.laws[1] is None else (0, 1)
        # All laws come before all trees: those leave the processor's cache to nobody.
        plain = [self._without_trees(seen, target) for target in targets]
        left, *left_s = [self._blend(seen, target, told) for target, told in zip(targets, plain, strict=True)]
        return left, left_s[0] if left_s else None

    def _has_trees(self, target: int) -> bool:
        return self.calibration[target] is not None and self.core.trees[target] is not None

    def _without_trees(self, seen: Seen, target: int) -> Floats:
        return self.core.by_laws(seen, target) if self._has_trees(target) else self._fallback(seen, target)

    def _blend(self, seen: Seen, target: int, by_laws: Floats) -> Floats:
        calibration = self.calibration[target]
        if calibration is None or self.core.trees[target] is None:
            return by_laws
        cell = (seen.known.astype(np.int64), np.searchsorted(BUCKETS, seen.steps, side="right") - 1)
        weight = calibration.weight[cell]
        both = (1.0 - weight) * self.core.by_trees(seen, target) + weight * by_laws
        both[1] = np.maximum(both[0], both[1] + calibration.shift[cell])
        return both

    def _fallback(self, seen: Seen, target: int) -> Floats:
        laws = self.core.laws[target]
        assert laws is not None
        shares = np.array([[0.5], [0.9]])
        constant = laws.constant.log_remaining(np.array(laws.location.overall), seen.done[target], shares)
        if self.finished < HISTORY_FROM:
            return constant
        by_laws = self.core.by_laws(seen, target)
        if self.finished >= PROMPT_FROM:
            return by_laws
        return np.where(seen.known, by_laws, constant)

    def _sources(self, seen: Seen) -> list[str]:
        if self._has_trees(0):
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
    if core.trees[0] is None:
        return Model(core, (None, None), complete)
    held = _held_back(finished, samples, settings)
    return Model(core, (_calibrate(held, 0), _calibrate(held, 1)), complete)


@dataclass(frozen=True)
class _Held:
    """Predictions for one part of the groups by a model that has not seen it, and what came true."""

    known: npt.NDArray[np.bool_]
    steps: npt.NDArray[np.int64]
    censored: npt.NDArray[np.bool_]
    trees: tuple[Floats, Floats]
    laws: tuple[Floats, Floats]
    truth: tuple[Floats, Floats]


def _held_back(finished: Sequence[Finished], samples: Samples, settings: TreeSettings) -> list[_Held]:
    parts = []
    for fold in range(settings.folds):
        inside = samples.fold != fold
        learnt = _outside(finished, samples, inside)
        if inside.all() or not any(not one.censored for one in learnt):
            continue
        core = fit_core(learnt, samples, inside, settings)
        if core.trees[0] is None:
            continue
        told = samples.take(~inside)
        seen = core.see(told.rows, told.facts(core.locate, core.locate_s))
        timed = core.trees[1] is not None
        nothing = np.full((2, len(told.rows)), NAN)
        teach = np.array([has_seconds(owner) for owner in told.owners])
        left = np.log1p(np.maximum(told.total(False) - told.done(False), 1.0))
        left_s = np.log1p(np.maximum(told.total(True) - told.done(True), 0.0))
        parts.append(
            _Held(
                known=seen.known,
                steps=seen.steps,
                censored=told.censored,
                trees=(core.by_trees(seen, 0), core.by_trees(seen, 1) if timed else nothing),
                laws=(core.by_laws(seen, 0), core.by_laws(seen, 1) if timed else nothing),
                truth=(left, np.where(teach, left_s, NAN)),
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


def _calibrate(parts: Sequence[_Held], target: int) -> Calibration | None:
    """Weights by least absolute error, then the shift by split conformal; small cells borrow from larger ones."""
    if not parts:
        return None
    trees = np.concatenate([part.trees[target] for part in parts], axis=1)
    laws = np.concatenate([part.laws[target] for part in parts], axis=1)
    truth = np.concatenate([part.truth[target] for part in parts])
    known = np.concatenate([part.known for part in parts])
    censored = np.concatenate([part.censored for part in parts])
    bucket = np.searchsorted(BUCKETS, np.concatenate([part.steps for part in parts]), side="right") - 1
    good = ~np.isnan(truth) & ~np.isnan(trees[0])
    if good.sum() < MIN_BUCKET_ROWS:
        return None
    weight, shift = np.zeros((2, len(BUCKETS))), np.zeros((2, len(BUCKETS)))
    for told in (0, 1):
        for number in range(len(BUCKETS)):
            cell = _cell(good, known == bool(told), np.abs(bucket - number))
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


def _cell(good: np.ndarray, side: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """The rows of a cell, widened over neighbouring decision points, then over both sides, until it is full."""
    for rows in (side, np.ones_like(side)):
        for width in range(len(BUCKETS)):
            cell = good & rows & (distance <= width)
            if cell.sum() >= MIN_BUCKET_ROWS:
                return np.asarray(cell)
    return good


def _quantile(above: Floats, censored: npt.NDArray[np.bool_]) -> float:
    """The 0.9 quantile with the conformal correction.

    Half way between that of the complete rows and that of all rows with censored ones as lower bounds: the first
    is too low where long ones are cut off more often, the second too high where what is cut off was near its end.
    """
    level = min(0.9 * (1 + 1 / len(above)), 0.99)
    both = float(ResidualLaw.fit(above, censored).quantile(np.array([1 - level]))[0])
    whole = above[~censored]
    return (both + float(np.quantile(whole, level))) / 2 if len(whole) else both
