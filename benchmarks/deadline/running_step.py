"""Estimated progress of the running steps of an engine; engines report tokens only when a step ends.

Without an estimate, a step of thousands of tokens that has just begun cannot be distinguished from one that is about to
end, which matters for plans of memory and time.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.transitions import TrajectoryState
from heddle_dask.cost.engine_cost import EngineCost

# Fixed-point rounds: sampled tokens lengthen the contexts, which slow iterations, which reduce sampled tokens.
_ROUNDS = 3
# Largest share of its predicted tokens that an unfinished step is estimated to have sampled.
_MOST_DONE = 0.97


def unseen_tokens(
    engine: Engine, residents: Sequence[Trajectory], cost: EngineCost, at: float
) -> dict[TrajectoryId, float]:
    """Estimated tokens that each running step of these residents has sampled since its request, by `cost`.

    At most `_MOST_DONE` of the predicted remaining tokens; 0 without a prediction. Steps that wait in the engine's own
    queue count as running, since the engine does not report when they get a slot.
    """
    running = [
        (t.trajectory_id, at - t.requested_at, _MOST_DONE * (t.remaining_tokens() or 0.0))
        for t in residents
        if t.state is TrajectoryState.GENERATING and t.counted_on == engine.engine_id
    ]
    if not running:
        return {}
    batch = min(len(engine.inflight), engine.spec.slots)
    made: dict[TrajectoryId, float] = {}
    sampled = 0.0
    for _ in range(_ROUNDS):
        # Half of `sampled` is its mean over the time since the request.
        token_s = cost.iteration_s(batch, int(engine.inflight_tokens + sampled / 2))
        made = {name: max(0.0, min(since_s / token_s, most)) for name, since_s, most in running}
        sampled = sum(made.values())
    return made
