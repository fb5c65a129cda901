"""The decision of `LoadBoard`, made by pricing a move to every engine."""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.strategies.migration.pricing import (
    EngineLoad,
    Link,
    Margin,
    MovingCandidate,
    PricedMove,
    price_move,
    price_stay,
)


def decide_move(
    candidate: MovingCandidate, loads: Sequence[EngineLoad], link: Link | None, margin: Margin
) -> PricedMove | None:
    """As `LoadBoard.decide`, pricing every engine; without the home among the `loads` the result is None."""
    home = next((load for load in loads if load.engine_id == candidate.home), None)
    if home is None or candidate.remaining_tokens <= 0 or candidate.moved >= margin.max_moves:
        return None
    stay = price_stay(candidate, home, margin)
    best: PricedMove | None = None
    for target in loads:
        move = None if target is home else price_move(candidate, target, link, margin, stay)
        if move is not None and (best is None or move.move_s < best.move_s):
            best = move
    return best
