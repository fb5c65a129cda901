"""How much room an engine has for one more trajectory, counted as it will be when it has grown.

Room is the scarcer of KV memory and slots. A trajectory takes its context, and `growth` more tokens for each token that
it is predicted to generate: half of what tools and answers will have added, averaged over its life.
"""

from __future__ import annotations

from heddle_dask.core.state import Engine, Trajectory

# Context tokens per predicted token: recorded coding agents read two tokens for each that they write, and a context
# that grows evenly is on average half as much longer as at its end.
GROWTH = 1.5


def expected_context_tokens(trajectory: Trajectory, growth: float) -> float:
    """The trajectory's context as it will be on average over the rest of its life."""
    context = max(trajectory.context_tokens, trajectory.spec.prompt_tokens)
    return context + growth * trajectory.expected_tokens


def reserved_tokens(engine: Engine, growth: float) -> float:
    """What the residents of the engine take, those in tools included, as they will be."""
    return engine.resident_tokens + growth * engine.expected_tokens
