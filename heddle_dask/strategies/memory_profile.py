"""Will one more context fit, now and until it ends? The KV memory of an engine as it will be used.

Trajectories that start together grow together: those that fit when they begin do not when they are long, and those that
would fit when they are long leave memory empty until then. So each is counted with the time that it stays. All are
taken to generate at one pace; after g more tokens, a trajectory that has r of them left holds ``context + growth * g``
while ``g <= r``, and nothing afterwards. The sum rises between two ends and falls at each, so that it fits everywhere
if it fits at every end (as the future part of LightLLM's "past-future" scheduler counts its requests).
"""

from __future__ import annotations

from bisect import bisect_right, insort


class MemoryProfile:
    """The residents of one engine, by what they hold and what they have left.

    Parameters
    ----------
    capacity_tokens
        Tokens that may be held at any time.
    growth
        Context tokens that come with each generated one.
    residents
        Context and remaining tokens of each.
    """

    def __init__(self, capacity_tokens: float, growth: float, residents: list[tuple[float, float]]) -> None:
        self._capacity = capacity_tokens
        self._growth = growth
        self._ends = sorted((left, context) for context, left in residents)
        self._sum()

    def _sum(self) -> None:
        """For each end the room that is left just before it, the least of that so far, and what is held beyond it."""
        held = sum(context for _, context in self._ends)
        self._held: list[float] = []
        self._least: list[float] = []
        least = float("inf")
        count = len(self._ends)
        for number, (left, context) in enumerate(self._ends):
            room = self._capacity - held - (count - number + 1) * self._growth * left
            least = min(least, room)
            self._held.append(held)
            self._least.append(least)
            held -= context

    def fits(self, context_tokens: float, left_tokens: float) -> bool:
        """Whether one more with this context and so much left fits until it ends."""
        ended = bisect_right(self._ends, (left_tokens, float("inf")))
        if ended and context_tokens > self._least[ended - 1]:
            return False
        beyond = len(self._ends) - ended
        held = self._held[ended] if beyond else 0.0
        return held + context_tokens + (beyond + 1) * self._growth * left_tokens <= self._capacity

    def add(self, context_tokens: float, left_tokens: float) -> None:
        """Count one more."""
        insort(self._ends, (left_tokens, context_tokens))
        self._sum()
