"""Priced migration: move only when another engine, with this trajectory added, finishes clearly earlier.

Three options are priced against the tool time still expected: *stay*; *transfer* the KV (what the tool does not hide
of it delays the next step); *recompute* on the target (its prefix cache is warmed while the tool runs; what the tool
does not hide delays the next step, and the prefill is work for the target in any case). An independent simulation found
this rule better than the paper's rank rule in every case (`rank_rule`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.strategies.migration.engine_load import EngineLoad

MoveKind = Literal["transfer", "recompute"]


@dataclass(slots=True)
class MovingCandidate:
    """A trajectory that might move.

    Attributes
    ----------
    remaining_tokens
        Predicted tokens that it will still generate.
    context_tokens
        Tokens in front of the model at its next step, as far as known: what a move must bring along.
    home
        Engine that holds its KV; the load of that engine counts it.
    tool_s
        Seconds that its running tools are still expected to take; 0 when none runs.
    cached_tokens
        By engine, how much of its context is in the prefix cache there already (the group's prompt, say).
    moved
        How often it has moved.
    """

    trajectory_id: TrajectoryId
    remaining_tokens: float
    context_tokens: float
    home: EngineId
    tool_s: float = 0.0
    cached_tokens: Mapping[EngineId, float] = field(default_factory=dict)
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """How KV travels between engines: ``setup_s + tokens · token_s``. No link: `None` in place of this."""

    setup_s: float
    token_s: float

    def transfer_s(self, tokens: float) -> float:
        """Seconds to bring so many tokens' KV over."""
        return self.setup_s + tokens * self.token_s


@dataclass(frozen=True, slots=True)
class Margin:
    """What *clearly earlier* means: both must hold.

    Attributes
    ----------
    relative
        Least gain as a share of what staying takes.
    absolute_s
        Least gain in seconds.
    max_moves
        Most moves of one trajectory: predictions that swing do not carry it to and fro for ever.
    kv_share
        Most of the target's KV memory that may be taken when this trajectory has grown to its predicted end.
    """

    relative: float = 0.15
    absolute_s: float = 1.0
    max_moves: int = 4
    kv_share: float = 1.0


@dataclass(frozen=True, slots=True)
class PricedMove:
    """Go to `target`. Times are from now until the trajectory's last token, tools to come not counted.

    Attributes
    ----------
    price_s
        Seconds that transfer or recomputation takes; `exposed_s` of them after the tool has returned.
    """

    trajectory_id: TrajectoryId
    target: EngineId
    kind: MoveKind
    stay_s: float
    move_s: float
    price_s: float
    exposed_s: float

    @property
    def gain_s(self) -> float:
        """Seconds that its end comes earlier."""
        return self.stay_s - self.move_s


def decide_move(
    candidate: MovingCandidate, loads: Sequence[EngineLoad], link: Link | None, margin: Margin
) -> PricedMove | None:
    """The move that ends this trajectory earliest if that is clearly earlier than staying, else None.

    A target must also, with the trajectory and its recomputation added, finish all its own work before the home
    would have with the trajectory on it: a move may not make another engine the last one.

    Parameters
    ----------
    loads
        Of all ready engines, the home among them; when it is not, the answer is None.
    link
        None when KV cannot be transferred.
    """
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


class Stay(NamedTuple):
    """What staying comes to.

    Attributes
    ----------
    stay_s
        Seconds to the trajectory's end at home.
    most_s
        The latest end elsewhere that is clearly earlier.
    drain_s
        Seconds until its home has finished all it holds.
    """

    stay_s: float
    most_s: float
    drain_s: float


def price_stay(candidate: MovingCandidate, home: EngineLoad, margin: Margin) -> Stay:
    """The trajectory goes on where it is; the load of `home` counts it."""
    remaining, context = candidate.remaining_tokens, candidate.context_tokens
    rest = home.without(remaining, context)
    stay_s = candidate.tool_s + rest.finish_s(remaining, context)
    most_s = min(stay_s - margin.absolute_s, stay_s * (1 - margin.relative))
    return Stay(stay_s, most_s, rest.drain_s(remaining, context))


def price_move(
    candidate: MovingCandidate, target: EngineLoad, link: Link | None, margin: Margin, stay: Stay
) -> PricedMove | None:
    """The cheapest way to that target; None when it does not fit there or is not clearly better."""
    if not _fits(candidate, target, margin):
        return None
    remaining, context = candidate.remaining_tokens, candidate.context_tokens
    finish_s = target.finish_s(remaining, context)
    if candidate.tool_s + finish_s > stay.most_s:  # whatever the price of moving
        return None
    drain_s = target.drain_s(remaining, context)
    if drain_s >= stay.drain_s:
        return None
    move = cheapest_move(candidate, target, link, stay.stay_s, finish_s)
    burden_s = move.price_s if move.kind == "recompute" else 0.0
    if drain_s + burden_s >= stay.drain_s or move.move_s > stay.most_s:
        return None
    return move


def cheapest_move(
    candidate: MovingCandidate, target: EngineLoad, link: Link | None, stay_s: float, finish_s: float
) -> PricedMove:
    """Transfer or recompute, whichever exposes less; of equals the one of smaller price.

    Parameters
    ----------
    stay_s
        Seconds to its end at home.
    finish_s
        Seconds on the target from its next step to its end.
    """
    cached = min(candidate.cached_tokens.get(target.engine_id, 0.0), candidate.context_tokens)
    missing = candidate.context_tokens - cached
    prices: list[tuple[float, MoveKind]] = [
        (target.cost.prefill_s(round(missing), round(cached)), "recompute")
    ]
    if link is not None:
        prices.append((link.transfer_s(missing), "transfer"))
    price_s, kind = min(prices, key=lambda price: (max(0.0, price[0] - candidate.tool_s), price[0]))
    exposed_s = max(0.0, price_s - candidate.tool_s)
    move_s = candidate.tool_s + exposed_s + finish_s
    return PricedMove(candidate.trajectory_id, target.engine_id, kind, stay_s, move_s, price_s, exposed_s)


def _fits(candidate: MovingCandidate, target: EngineLoad, margin: Margin) -> bool:
    grown = candidate.context_tokens + candidate.remaining_tokens
    room = margin.kv_share * target.cost.capacity_tokens - target.kv_tokens
    return candidate.context_tokens <= target.max_context_tokens and grown <= room
