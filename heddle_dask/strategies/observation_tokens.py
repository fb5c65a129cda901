"""How much tools add to the contexts: what has been seen so far, and before that what was known earlier."""

from __future__ import annotations

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.view import ClusterView

# Tokens per generated one where neither the predictor nor this session knows: recorded coding agents read two for each
# that they write. What was known before the session weighs as much as so many generated tokens: a guess little, and
# what the predictor knows much, since those that end first are the short ones.
_PER_TOKEN, _WEIGHT_TOKENS, _KNOWN_WEIGHT_TOKENS = 2.0, 1e3, 2e5


def observed_per_token(view: ClusterView) -> float:
    """Tokens that tools add for each one generated, by this session and, while it is young, by earlier ones."""
    known = view.observed_per_token
    weight = _WEIGHT_TOKENS if known is None else _KNOWN_WEIGHT_TOKENS
    observed = view.observed_tokens + (_PER_TOKEN if known is None else known) * weight
    return observed / (view.sampled_tokens + weight)


def growth_of(trajectory: Trajectory, growth: float) -> float:
    """Context tokens that come with each one it will generate; `growth` where nobody knows of this one."""
    said = trajectory.prediction
    if said is None or said.observation_tokens is None or not said.tokens:
        return growth
    return 1.0 + said.observation_tokens / said.tokens
