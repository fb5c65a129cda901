"""Predictors that know the true lengths, for ablations: an exact oracle, and one with a known error."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from heddle_dask.core.nouns import Prediction
from heddle_dask.predictors.contract import Fitted
from heddle_dask.predictors.features import NAN, Finished, Progress


@dataclass(frozen=True, slots=True)
class KnownWork:
    """True totals by trajectory id: tokens, tool seconds, observation tokens. Entries may be added later."""

    tokens: dict[str, float] = field(default_factory=dict)
    tools_s: dict[str, float] = field(default_factory=dict)
    observed_tokens: dict[str, float] = field(default_factory=dict)

    def observation_left(self, row: Progress) -> float | None:
        """Tokens that tools will still add to a context; None when unknown."""
        total = self.observed_tokens.get(row.trajectory_id, NAN)
        if math.isnan(total):
            return None
        return max(total - max(0, row.context_tokens - row.prompt_tokens - row.generated_tokens), 0.0)


class Oracle:
    """Predicts the true remaining length. A trajectory that is not in the mapping is predicted to end at once.

    Parameters
    ----------
    known
        True totals. They are read at each prediction, so trajectories may be added later.
    """

    source = "oracle"

    def __init__(self, known: KnownWork, *, observation_per_token: float | None = None) -> None:
        self._known = known
        self._observation_per_token = observation_per_token

    def predict(self, rows: Sequence[Progress]) -> list[Prediction]:
        """The true remaining tokens; both quantiles are equal."""
        return [self._one(row) for row in rows]

    def _one(self, row: Progress) -> Prediction:
        tokens = max(self._known.tokens.get(row.trajectory_id, 0.0) - row.generated_tokens, 1.0)
        return self._told(tokens, tokens, self._tools_left_s(row, 1.0), self._known.observation_left(row))

    def _tools_left_s(self, row: Progress, factor: float) -> float:
        total_s = self._known.tools_s.get(row.trajectory_id, NAN)
        return 0.0 if math.isnan(total_s) else max(total_s * factor - row.tools_s, 0.0)

    def _told(self, tokens: float, high: float, tools_s: float, observation_tokens: float | None = None) -> Prediction:
        return Prediction(tokens, high, self.source, tools_s, observation_tokens, self._observation_per_token)

    def observe_running(self, progress: Progress) -> None:
        """Nothing to learn."""

    def observe_finished(self, finished: Finished) -> None:
        """Nothing to learn."""

    def warm_start(self, finished: Iterable[Finished]) -> None:
        """Nothing to learn."""

    def due(self) -> bool:
        return False

    def fit(self) -> Fitted | None:
        return None

    def adopt(self, fitted: Fitted) -> None:
        """Nothing was fitted."""


class NoisyOracle(Oracle):
    """Predicts each total times a log-normal factor, drawn once per trajectory from the seed and its id.

    Parameters
    ----------
    error
        Typical factor, at least 1: the standard deviation of the log is its logarithm.
    """

    source = "noisy oracle"

    def __init__(
        self,
        known: KnownWork,
        *,
        observation_per_token: float | None = None,
        error: float = 2.0,
        seed: int = 0,
    ) -> None:
        if not error >= 1.0:
            raise ValueError(f"error {error}: use a factor of at least 1")
        super().__init__(known, observation_per_token=observation_per_token)
        self._spread = math.log(error)
        self._seed = seed

    def _one(self, row: Progress) -> Prediction:
        # A string seeds `Random` by its bytes, which is the same in every process.
        factor = math.exp(self._spread * random.Random(f"{self._seed}|{row.trajectory_id}").gauss(0.0, 1.0))
        wide = math.exp(1.2816 * self._spread)
        total = self._known.tokens.get(row.trajectory_id, 0.0)
        tokens = max(total * factor - row.generated_tokens, 1.0)
        high = max(total * factor * wide - row.generated_tokens, tokens)
        return self._told(tokens, high, self._tools_left_s(row, factor))
