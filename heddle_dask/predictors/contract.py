"""What a predictor promises to the controller's body.

A prediction is a pair of quantiles of the tokens left. `predict` is quick and always
answers, from the last model or a fallback; `fit_if_due` is slow and belongs into an executor. Both may run at
the same time in two threads: a fit swaps the finished model in with one assignment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from heddle_dask.core.prediction import Prediction
from heddle_dask.predictors.features import Finished, Progress


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

    def fit_if_due(self) -> bool:
        """Refit if enough has been learnt since the last fit; True if a new model is in place. Slow."""
        ...
