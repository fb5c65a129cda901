"""Observation tokens per generated token, from this session and from earlier ones."""

from __future__ import annotations

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.view import ClusterView

# Prior observation tokens per generated token: recorded coding agents read two tokens for each that they write. The
# weights, in generated tokens, are those of this prior and of the predictor's value. The latter is large, because the
# first trajectories that end are the short ones.
_PER_TOKEN, _WEIGHT_TOKENS, _KNOWN_WEIGHT_TOKENS = 2.0, 1e3, 2e5


def observed_per_token(view: ClusterView) -> float:
    """Observation tokens per generated token, from this session and, at its beginning, from earlier ones."""
    known = view.observed_per_token
    weight = _WEIGHT_TOKENS if known is None else _KNOWN_WEIGHT_TOKENS
    observed = view.observed_tokens + (_PER_TOKEN if known is None else known) * weight
    return observed / (view.sampled_tokens + weight)


def growth_of(trajectory: Trajectory, growth: float) -> float:
    """Context tokens added per token that the trajectory will generate; `growth` without a prediction of it."""
    said = trajectory.prediction
    if said is None or said.observation_tokens is None or not said.tokens:
        return growth
    return 1.0 + said.observation_tokens / said.tokens
