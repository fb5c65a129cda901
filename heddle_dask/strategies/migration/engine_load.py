"""One engine's load as migration sees it, and when a trajectory on it would end."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.ids import EngineId
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.partition.work import area_of, busy_s


@dataclass(slots=True)  # not frozen: several are made at each prediction, and freezing costs most of that
class EngineLoad:
    """Sums over the trajectories whose home this engine is, those in tools included.

    Attributes
    ----------
    residents
        How many they are.
    remaining_tokens, longest_tokens
        Predicted tokens that they will still generate: the sum, and the largest of one.
    kv_tokens
        Context tokens that they hold now.
    duty
        Share of its time that a resident is on the engine rather than in tools; 1 when unknown.
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
        """The load once a resident of that size has left. `longest_tokens` stays: it may be another's."""
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
        """Seconds until one more trajectory that needs so many tokens has generated them here.

        The others decode beside it: each what it still needs, but not more than the newcomer while that runs, and
        only the share `duty` of that. Knowing sum and count, not each, that is at most
        ``min(sum, residents · duty · remaining)``; exact when all need the same. Queueing for slots and memory
        stretches it as in `partition.work`.
        """
        others = min(self.remaining_tokens, self.residents * self.duty * remaining_tokens)
        return self._busy_s(remaining_tokens, others, remaining_tokens, context_tokens)

    def drain_s(self, remaining_tokens: float, context_tokens: float) -> float:
        """Seconds until the engine, with one more trajectory of that size, has finished all it holds."""
        longest = max(self.longest_tokens, remaining_tokens)
        return self._busy_s(longest, self.remaining_tokens, remaining_tokens, context_tokens)

    def _busy_s(self, longest: float, others: float, remaining: float, context: float) -> float:
        area = area_of(remaining, context)
        if self.residents:
            mean_context = (self.kv_tokens + self.remaining_tokens / 2) / self.residents
            area += others * mean_context
        return busy_s(self.cost, self.slots, longest, others + remaining, area)
