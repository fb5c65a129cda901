"""A prediction of a trajectory's remaining work, counted from its last finished step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Quantile = Literal["median", "q90"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Remaining work of a trajectory, counted from its last finished step to its end.

    Attributes
    ----------
    tokens, tokens_q90
        Median and 0.9 quantile of the tokens still to be generated.
    source
        The model of the prediction: ``xgboost``, ``group history``, ``prompt only``, ``constant``, ``oracle``,
        ``noisy oracle``.
    tools_s
        Seconds of tool calls still to come; 0 when unknown.
    observation_tokens
        Tokens that these tools will add to the context; None when unknown.
    observation_per_token
        Observation tokens per generated token, over all finished trajectories that the predictor has observed; None
        before the first.
    learnt_from
        Finished trajectories that the predictor had observed at the fit of its model, those of earlier runs included;
        None: it does not learn.
    """

    tokens: float
    tokens_q90: float
    source: str = ""
    tools_s: float = 0.0
    observation_tokens: float | None = None
    observation_per_token: float | None = None
    learnt_from: int | None = None

    def quantile_tokens(self, quantile: Quantile) -> float:
        """`tokens` or `tokens_q90`."""
        return self.tokens_q90 if quantile == "q90" else self.tokens

    @property
    def is_exact(self) -> bool:
        """Whether both quantiles are equal, as for an oracle."""
        return self.tokens == self.tokens_q90
