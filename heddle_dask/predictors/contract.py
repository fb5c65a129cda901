"""What a predictor promises to the controller's body.

A prediction is a pair of quantiles of the tokens left. `predict` is quick and always
answers, from the last model or a fallback; `fit` is slow and belongs into an executor. Both may run at the same time in
two threads: `adopt` swaps the finished model in with one assignment. `predictors.service` says when each of them runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from heddle_dask.core.prediction import Prediction
from heddle_dask.predictors.features import Finished, Progress


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model that was fitted and does not answer yet.

    Attributes
    ----------
    rows
        Decision points that it learnt from: what a fit takes goes with them.
    told
        Finished trajectories that the predictor had been told of when the fit began.
    """

    model: Any
    rows: int
    told: int


class Predictor(Protocol):
    """Predicts remaining work and learns from what it is told."""

    def predict(self, rows: Sequence[Progress]) -> list[Prediction]:
        """One prediction per row, in order; never fails for lack of data."""
        ...

    def observe_running(self, progress: Progress) -> None:
        """A trajectory has reached a decision point; it counts as a running sibling and as censored data."""
        ...

    def observe_finished(self, finished: Finished) -> None:
        """A trajectory has ended; with no `points`, those told by `observe_running` are taken."""
        ...

    def warm_start(self, finished: Iterable[Finished]) -> None:
        """Learn from earlier trajectories, oldest first, and fit at once."""
        ...

    def due(self) -> bool:
        """Whether enough has been learnt since the last fit."""
        ...

    def fit(self) -> Fitted | None:
        """Fit on all that was learnt; `predict` goes on with the old model. None without data. Slow."""
        ...

    def adopt(self, fitted: Fitted) -> None:
        """Answer with this model from now on."""
        ...
