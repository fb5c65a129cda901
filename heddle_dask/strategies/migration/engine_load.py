"""The load of one engine for migration, and the end of a trajectory on it."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.ids import EngineId
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
