"""Will one more context fit, now and until it ends? The KV memory of an engine as it will be used.

Trajectories that start together grow together: those that fit when they begin do not when they are long, and those that
would fit when they are long leave memory empty until then. So each is counted with the time that it stays. All are
taken to generate at one pace; after g more tokens, a trajectory that is still there holds ``context + growth * g``, and
nothing when it has ended (as the future part of LightLLM's "past-future" scheduler counts its requests).

How long one stays is known as a law, and counted as such: by a few lengths, equally likely. If everybody were taken to
end at its mean, all of them would hold what they hold then; in truth some have ended by that time and others will be
longer, and at no time is as much in use. What is in use after g tokens is a sum with a mean and, each trajectory by
itself, a variance; so many standard deviations as asked for are kept free. Between two ends the sum rises, so that it
fits everywhere if it fits just before every end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class _Held(NamedTuple):
    """What is held after g more tokens, until the next end: ``context + growth * g * alive`` in the mean.

    The variance has the sums of p(1 - p) over the residents, plain, times context, and times its square, where p is how
    likely one is still there.
    """

    context: float
    alive: float
    plain: float = 0.0
    linear: float = 0.0
    square: float = 0.0

    def tokens(self, grown: float, margin: float) -> float:
        """Mean and margin, each resident having grown by so much."""
        mean = self.context + self.alive * grown
        if not margin or self.plain <= 0:
            return mean
        variance = self.square + grown * (2 * self.linear + grown * self.plain)
        return mean + margin * math.sqrt(max(0.0, variance))


class MemoryProfile:
    """The residents of one engine, by what they hold and what they may have left.

    Parameters
    ----------
    capacity_tokens
        Tokens that may be held at any time.
    growth
        Context tokens that come with each generated one.
    residents
        Context of each, and the tokens that it may have left: at least one length, equally likely.
    margin
        Standard deviations of what is held that are kept free.
    """

    def __init__(
        self,
        capacity_tokens: float,
        growth: float,
        residents: Sequence[tuple[float, Sequence[float]]],
        margin: float = 0.0,
    ) -> None:
        self._capacity = capacity_tokens
        self._growth = growth
        self._margin = margin
        self._residents = list(residents)
        self._sum()

    def _sum(self) -> None:
        """For each end the least room just before it and all ends until then, and what is held from there on."""
        self._more = 0.0  # capacity that comes after the sums are made
        residents, growth, margin = self._residents, self._growth, self._margin
        ends = sorted([(left, n) for n, (_, lefts) in enumerate(residents) for left in lefts])
        alive = [len(lefts) for _, lefts in residents]
        held = _Held(sum([context for context, _ in residents]), float(len(residents)))
        self._helds, self._leasts = [held], []
        least, before = math.inf, -1.0
        for left, number in ends:
            if left != before:
                grown = growth * left
                least = min(least, self._capacity - held.tokens(grown, margin) - grown)
                before = left
            context, lefts = residents[number]
            held = _without_one(held, context, alive[number], len(lefts))
            alive[number] -= 1
            self._leasts.append(least)
            self._helds.append(held)
        self._ends = [left for left, _ in ends]

    def set_capacity(self, capacity_tokens: float) -> None:
        """So many tokens may be held from now on. O(1)."""
        self._more += capacity_tokens - self._capacity
        self._capacity = capacity_tokens

    def fits(self, context_tokens: float, left_tokens: float) -> bool:
        """Whether one more with this context fits for so many tokens; that one is there until then for certain."""
        ended = bisect_right(self._ends, left_tokens)
        if ended and context_tokens > self._leasts[ended - 1] + self._more:
            return False
        grown = self._growth * left_tokens
        return self._helds[ended].tokens(grown, self._margin) + context_tokens + grown <= self._capacity

    def add(self, context_tokens: float, left_tokens: Sequence[float]) -> None:
        """Count one more."""
        self._residents.append((context_tokens, left_tokens))
        self._sum()


def _without_one(held: _Held, context: float, alive: int, count: int) -> _Held:
    """One of the `alive` lengths left of `count` has passed."""
    if count == 1:
        return _Held(held.context - context, held.alive - 1.0, held.plain, held.linear, held.square)
    less = (2 * alive - 1 - count) / (count * count)  # q(1 - q) - p(1 - p)
    return _Held(
        held.context - context / count,
        held.alive - 1.0 / count,
        held.plain + less,
        held.linear + less * context,
        held.square + less * context * context,
    )
