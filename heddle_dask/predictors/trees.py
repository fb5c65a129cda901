"""Boosted trees: medians and 0.9 quantiles of the log of the tokens left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xgboost as xgb

from heddle_dask.predictors.features import Floats
from heddle_dask.predictors.tree_arrays import TreeArrays

QUANTILES = (0.5, 0.9)
# Weight of a censored row, whose target is drawn, relative to an observed one.
CENSORED_WEIGHT = 0.2
# With fewer rows no trees are grown.
MIN_ROWS = 30
# Up to this many rows the trees answer as arrays.
FEW_ROWS = 64


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """Size of the trees and of the data; `rounds` trees per quantile.

    80 and 30 rounds at 0.1 predict no better and take 8 % longer for 64 rows, a third longer to fit
    (experiments.md, predictor start).

    `start_rounds` more trees, less deep, are for the first decision point alone: it has few known facts and far fewer
    rows.
    """

    rounds: int = 60
    start_rounds: int = 60
    start_depth: int = 4
    depth: int = 5
    learning_rate: float = 0.13
    max_rows: int = 24_000
    folds: int = 3
    threads: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TreeRows:
    """Training rows of the trees; `first`: no step finished yet."""

    features: npt.NDArray[np.float32]
    target: Floats
    censored: npt.NDArray[np.bool_]
    first: npt.NDArray[np.bool_]

    def take(self, use: npt.NDArray[np.bool_]) -> TreeRows:
        return TreeRows(self.features[use], self.target[use], self.censored[use], self.first[use])


@dataclass(frozen=True)
class Trees:
    """Boosted trees for all decision points, and others for the first one alone if it had enough rows.

    Before its first step only the prompt, the policy and the siblings of a trajectory are known. In the common trees
    such rows are few, and most splits are on facts about steps.
    """

    any_step: xgb.Booster
    start: xgb.Booster | None

    @cached_property
    def _any_step_arrays(self) -> TreeArrays:
        return TreeArrays.of(self.any_step)

    @cached_property
    def _start_arrays(self) -> TreeArrays:
        assert self.start is not None
        return TreeArrays.of(self.start)

    def prepare(self) -> None:
        """Convert the trees now, which takes a tenth of a second, and not at the first question."""
        _ = self._any_step_arrays
        if self.start is not None:
            _ = self._start_arrays

    def log_remaining(self, features: npt.NDArray[np.float32], steps: npt.NDArray[np.int64]) -> Floats:
        """Quantiles (2, n)."""
        first = steps == 0
        if self.start is None or not first.any():
            return self._ask_any_step(features)
        if first.all():
            return self._ask_start(features)
        out = np.empty((2, len(steps)))
        out[:, first] = self._ask_start(features[first])
        out[:, ~first] = self._ask_any_step(features[~first])
        return out

    def _ask_any_step(self, features: npt.NDArray[np.float32]) -> Floats:
        few = len(features) <= FEW_ROWS
        told = self._any_step_arrays.ask(features) if few else self.any_step.inplace_predict(features)
        return np.asarray(told, dtype=np.float64).T

    def _ask_start(self, features: npt.NDArray[np.float32]) -> Floats:
        assert self.start is not None
        few = len(features) <= FEW_ROWS
        told = self._start_arrays.ask(features) if few else self.start.inplace_predict(features)
        return np.asarray(told, dtype=np.float64).T


def grow_trees(rows: TreeRows, settings: TreeSettings) -> Trees | None:
    """`rounds` trees per quantile for all rows, and `start_rounds` for first decision points; None for few rows."""
    if len(rows.target) < MIN_ROWS:
        return None
    step = settings.learning_rate * settings.rounds
    rounds, start_rounds = settings.rounds, settings.start_rounds
    shape = {"max_depth": settings.depth, "colsample_bytree": 0.6, "eta": step / rounds}
    any_step = _grow(rows, settings, rounds, shape)
    if not start_rounds or rows.first.sum() < MIN_ROWS:
        return Trees(any_step, None)
    # Most columns are empty before the first step, so each tree gets all columns.
    shape = {"max_depth": settings.start_depth, "colsample_bytree": 1.0, "eta": step / start_rounds}
    return Trees(any_step, _grow(rows.take(rows.first), settings, start_rounds, shape))


def _grow(rows: TreeRows, settings: TreeSettings, rounds: int, shape: Mapping[str, float]) -> xgb.Booster:
    parameters = {
        "objective": "reg:quantileerror",
        "quantile_alpha": list(QUANTILES),
        "tree_method": "hist",
        "max_bin": 64,
        "min_child_weight": 10,
        "subsample": 0.8,
        "nthread": settings.threads,
        "seed": settings.seed,
        "verbosity": 0,
        **shape,
    }
    data = xgb.QuantileDMatrix(
        rows.features,
        rows.target,
        weight=np.where(rows.censored, CENSORED_WEIGHT, 1.0),
        max_bin=64,
        nthread=settings.threads,
    )
    return xgb.train(parameters, data, num_boost_round=rounds)
