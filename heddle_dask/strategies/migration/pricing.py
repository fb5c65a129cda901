"""Priced migration: move only when the trajectory ends clearly earlier on another engine.

Three options are compared, given the expected rest of the tool call: *stay*; *transfer* the KV; *recompute* it on the
target, whose prefix cache is warmed during the tool call. The part of a transfer or recomputation that exceeds the
tool call delays the next step, and a recomputation is work for the target in any case. In an independent simulation
this rule was better than the paper's rank rule in every case (`rank_rule`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.partition.work import area_of, busy_s


@dataclass(slots=True)  # not frozen, for speed: several are made at each prediction
class EngineLoad:
    """Sums over the trajectories with this home (residents), including those in tool calls.

    Attributes
    ----------
    residents
        Number of residents.
    remaining_tokens, longest_tokens
        Predicted remaining tokens: the sum, and the maximum over residents.
    kv_tokens
        Their context tokens now.
    duty
        Share of a resident's time on the engine, as opposed to tools; 1 when unknown.
    max_context_tokens
        Longest context the engine takes.
    """

    engine_id: EngineId
    cost: EngineCost
    slots: int
    residents: int = 0
    remaining_tokens: float = 0.0
    longest_tokens: float = 0.0
    kv_tokens: float = 0.0
    duty: float = 1.0
    max_context_tokens: float = float("inf")

    def without(self, remaining_tokens: float, context_tokens: float) -> EngineLoad:
        """The load without a resident of that size. `longest_tokens` is kept: it may be another resident's."""
        return EngineLoad(
            self.engine_id,
            self.cost,
            self.slots,
            max(0, self.residents - 1),
            max(0.0, self.remaining_tokens - remaining_tokens),
            self.longest_tokens,
            max(0.0, self.kv_tokens - context_tokens),
            self.duty,
            self.max_context_tokens,
        )

    def finish_s(self, remaining_tokens: float, context_tokens: float) -> float:
        """Seconds until one more trajectory has generated `remaining_tokens` here.

        Meanwhile each resident decodes its remaining tokens, but no more than the new trajectory, times `duty`. With
        the sum and the count of residents, that is at most ``min(sum, residents · duty · remaining)``; exact if all
        have the same length. Queueing for slots and memory adds time as in `partition.work`.
        """
        others = min(self.remaining_tokens, self.residents * self.duty * remaining_tokens)
        return self._busy_s(remaining_tokens, others, remaining_tokens, context_tokens)

    def drain_s(self, remaining_tokens: float, context_tokens: float) -> float:
        """Seconds until the engine, with one more trajectory of that size, has finished all its trajectories."""
        longest = max(self.longest_tokens, remaining_tokens)
        return self._busy_s(longest, self.remaining_tokens, remaining_tokens, context_tokens)

    def _busy_s(self, longest: float, others: float, remaining: float, context: float) -> float:
        area = area_of(remaining, context)
        if self.residents:
            mean_context = (self.kv_tokens + self.remaining_tokens / 2) / self.residents
            area += others * mean_context
        return busy_s(self.cost, self.slots, longest, others + remaining, area)


MoveKind = Literal["transfer", "recompute"]


@dataclass(slots=True)
class MovingCandidate:
    """A trajectory that may move.

    Attributes
    ----------
    remaining_tokens
        Predicted remaining tokens.
    context_tokens
        Context tokens at its next step, as far as known: the tokens that a move transfers or recomputes.
    home
        Engine that holds its KV; the load of that engine includes it.
    tool_s
        Expected remaining seconds of its running tools; 0 if none runs.
    cached_tokens
        Context tokens in the prefix cache of each engine (such as the group's prompt).
    moved
        Number of its moves so far.
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
    """A link for KV transfers: ``setup_s + tokens · token_s`` seconds. Without a link, `None` is used."""

    setup_s: float
    token_s: float

    def transfer_s(self, tokens: float) -> float:
        return self.setup_s + tokens * self.token_s


@dataclass(frozen=True, slots=True)
class Margin:
    """Meaning of *clearly earlier*: both gains must be reached.

    Attributes
    ----------
    relative
        Minimum gain as a share of the time without a move.
    absolute_s
        Minimum gain in seconds.
    max_moves
        Maximum number of moves of one trajectory, against moves to and fro with fluctuating predictions.
    kv_share
        Maximum share of the target's KV memory in use when this trajectory has its predicted final length.
    """

    relative: float = 0.15
    absolute_s: float = 1.0
    max_moves: int = 4
    kv_share: float = 1.0


@dataclass(frozen=True, slots=True)
class PricedMove:
    """A move to `target`. Times are from now until the trajectory's last token, without later tool calls.

    Attributes
    ----------
    price_s
        Seconds of the transfer or recomputation; `exposed_s`: the part after the tool has returned.
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
        """Seconds by which the trajectory ends earlier."""
        return self.stay_s - self.move_s


class NoMove(NamedTuple):
    """The alternative without a move.

    Attributes
    ----------
    stay_s
        Seconds to the trajectory's end at home.
    most_s
        The latest end elsewhere that counts as clearly earlier, seconds.
    drain_s
        Seconds until its home has finished all its trajectories.
    """

    stay_s: float
    most_s: float
    drain_s: float


def price_stay(candidate: MovingCandidate, home: EngineLoad, margin: Margin) -> NoMove:
    """Times if the trajectory stays; the load of `home` includes it."""
    remaining, context = candidate.remaining_tokens, candidate.context_tokens
    rest = home.without(remaining, context)
    stay_s = candidate.tool_s + rest.finish_s(remaining, context)
    most_s = min(stay_s - margin.absolute_s, stay_s * (1 - margin.relative))
    return NoMove(stay_s, most_s, rest.drain_s(remaining, context))


def price_move(
    candidate: MovingCandidate, target: EngineLoad, link: Link | None, margin: Margin, stay: NoMove
) -> PricedMove | None:
    """The cheapest move to that target; None if the trajectory does not fit there or does not end clearly earlier."""
    if not _fits(candidate, target, margin):
        return None
    remaining, context = candidate.remaining_tokens, candidate.context_tokens
    finish_s = target.finish_s(remaining, context)
    if candidate.tool_s + finish_s > stay.most_s:  # too late even without the time of the move
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
    """Transfer or recompute, whichever exposes fewer seconds; ties: the one with the smaller price.

    Parameters
    ----------
    stay_s
        Seconds to its end at home.
    finish_s
        Seconds on the target from its next step to its end.
    """
    cached = min(candidate.cached_tokens.get(target.engine_id, 0.0), candidate.context_tokens)
    missing = candidate.context_tokens - cached
    prices: list[tuple[float, MoveKind]] = [(target.cost.prefill_s(round(missing), round(cached)), "recompute")]
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
