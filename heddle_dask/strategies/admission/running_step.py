"""How far the running steps of an engine are, by the clock: nobody reports tokens before a step ends.

A step of thousands of tokens that has just begun and one that is about to end look alike to whoever only hears of ends.
Whoever plans memory and time for a full engine must not take the second for the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.transitions import TrajectoryState
from heddle_dask.cost.engine_cost import EngineCost

# What a step has sampled changes the contexts that an iteration reads, and with them how much it has sampled.
_ROUNDS = 3
# Nobody is taken to have ended before it says so.
_MOST_DONE = 0.97


def unseen_tokens(
    engine: Engine, residents: Sequence[Trajectory], cost: EngineCost, at: float
) -> dict[TrajectoryId, float]:
    """Tokens that each running step of these residents has sampled since it was asked for, as `cost` tells.

    At most nearly all that is predicted to be left: nothing for who has no prediction. Those that wait for a slot of
    the engine count as running, since nobody knows when they got it.
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
        # On the way it was half as much.
        token_s = cost.iteration_s(batch, int(engine.inflight_tokens + sampled / 2))
        made = {name: max(0.0, min(since_s / token_s, most)) for name, since_s, most in running}
        sampled = sum(made.values())
    return made
