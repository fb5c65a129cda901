"""How much tools add to the contexts: what has been seen so far, and before that what was known earlier."""

from __future__ import annotations

from heddle_dask.core.view import ClusterView

# Tokens per generated one where neither the predictor nor this session knows: recorded coding agents read two for each
# that they write. What was known before the session weighs as much as so many generated tokens.
_PER_TOKEN, _WEIGHT_TOKENS = 2.0, 1000.0


def observed_per_token(view: ClusterView) -> float:
    """Tokens that tools add for each one generated, by this session and, while it is young, by earlier ones."""
    known = view.observed_per_token
    observed = view.observed_tokens + (_PER_TOKEN if known is None else known) * _WEIGHT_TOKENS
    return observed / (view.sampled_tokens + _WEIGHT_TOKENS)
