"""The contract between a predictor and the body of the controller.

A prediction is a pair of quantiles of the tokens left. `predict` takes milliseconds and always answers, from the last
model or from a fallback; `fit` takes seconds and belongs into an executor. Both may run at the same time in two
threads: `adopt` swaps the finished model in with one assignment. `predictors.service` decides when each of them runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from heddle_dask.core.nouns import Prediction
from heddle_dask.predictors.features import Finished, Progress


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted model that is not in use yet.

    Attributes
    ----------
    rows
        Decision points in the training data; the duration of a fit grows with them.
    told
        Finished trajectories that the predictor had observed when the fit began.
    """

    model: Any
    rows: int
    told: int


class Predictor(Protocol):
    """Predicts remaining work and learns from the trajectories that it observes."""

    def predict(self, rows: Sequence[Progress]) -> list[Prediction]:
        """One prediction per row, in order; never fails for lack of data."""

    def observe_running(self, progress: Progress) -> None:
        """Record a decision point of a running trajectory: a running sibling, and censored training data."""

    def observe_finished(self, finished: Finished) -> None:
        """Record the end of a trajectory; empty `points` mean the points from `observe_running`."""

    def warm_start(self, finished: Iterable[Finished]) -> None:
        """Learn from earlier trajectories, oldest first, and fit at once."""

    def due(self) -> bool:
        """Whether enough trajectories have ended since the last fit to fit again."""

    def fit(self) -> Fitted | None:
        """Fit on all observations; `predict` goes on with the old model. None without data. Takes seconds."""

    def adopt(self, fitted: Fitted) -> None:
        """Answer with this model from now on."""
