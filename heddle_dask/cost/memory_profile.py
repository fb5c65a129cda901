"""Will one more context fit, now and until it ends? The KV memory of an engine as it will be used.

Trajectories that start together grow together: those that fit when they begin do not when they are long, and those that
would fit when they are long leave memory empty until then. So each is counted with the time that it stays. All are
taken to go on at one pace; after t more tokens, a trajectory that is still there holds ``context + growth * t``, each
by its own growth, and nothing when it has ended (as the future part of LightLLM's "past-future" scheduler counts its
requests). Time is counted in tokens; who spends a part of it in tools grows the more slowly.

How long one stays is known as a law, and counted as such: by a few lengths, equally likely. If everybody were taken to
end at its mean, all of them would hold what they hold then; in truth some have ended by that time and others will be
longer, and at no time is as much in use. What is in use after t tokens is a sum with a mean and, each trajectory by
itself, a variance; so many standard deviations as asked for are kept free. Between two ends the sum rises, so that it
fits everywhere if it fits just before every end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray


class MemoryProfile:
    """The residents of one engine, by what they hold and what they may have left.

    After t more tokens, until the next end, the sum of p(context + growth * t) over the residents is held in the mean,
    where p is how likely one is still there. The variance has the sum of p(1 - p)(context + growth * t)**2: those of
    growth squared, of growth times context and of context squared.

    Parameters
    ----------
    capacity_tokens
        Tokens that may be held at any time.
    residents
        Context of each, the tokens that it may have left (at least one length, equally likely, ascending), how many
        times as long it stays as they take (1 for who calls no tool), and the context tokens that come with each.
    margin
        Standard deviations of what is held that are kept free.
    """

    def __init__(
        self,
        capacity_tokens: float,
        residents: Sequence[tuple[float, Sequence[float], float, float]],
        margin: float = 0.0,
    ) -> None:
        self._capacity = capacity_tokens
        self._margin = margin
        self._residents = list(residents)
        self._sum()

    def _sum(self) -> None:
        """For each end what is free just before it, and what is held from there on."""
        self._more = 0.0  # capacity that comes after the sums are made
        contexts = np.array([context for context, _, _, _ in self._residents])
        stretches = np.array([stretch for _, _, stretch, _ in self._residents])
        growths = np.array([growth for _, _, _, growth in self._residents]) / stretches
        counts = np.array([len(lefts) for _, lefts, _, _ in self._residents], dtype=np.int64)
        lefts = np.fromiter(chain.from_iterable([lefts for _, lefts, _, _ in self._residents]), np.float64)
        lefts *= np.repeat(stretches, counts)
        order = np.argsort(lefts, kind="stable")
        ends = lefts[order]
        context, count = np.repeat(contexts, counts)[order], np.repeat(counts, counts)[order]
        growth = np.repeat(growths, counts)[order]
        # With each end one of the lengths of a resident has passed, and as many as `alive` had not before it.
        passed = np.arange(len(lefts)) - np.repeat(np.cumsum(counts) - counts, counts)
        alive = count - passed[order]
        less = (2 * alive - 1 - count) / (count * count)  # q(1 - q) - p(1 - p)
        self._context = _from(contexts.sum(), -context / count)
        self._growth = _from(growths.sum(), -growth / count)
        self._square = _from(0.0, less * context * context)
        self._linear = _from(0.0, less * context * growth)
        self._steep = _from(0.0, less * growth * growth)
        variance = self._square[:-1] + ends * (2 * self._linear[:-1] + ends * self._steep[:-1])
        held = (
            self._context[:-1] + self._growth[:-1] * ends + self._margin * np.sqrt(np.maximum(0.0, variance))
        )
        self._free = self._capacity - held
        # Of those that end together the first knows what all held.
        self._free[1:][ends[1:] == ends[:-1]] = math.inf
        self._ends = ends

    def set_capacity(self, capacity_tokens: float) -> None:
        """So many tokens may be held from now on. O(1)."""
        self._more += capacity_tokens - self._capacity
        self._capacity = capacity_tokens

    def fits(
        self, context_tokens: float, left_tokens: float, stretch: float = 1.0, growth: float = 1.0
    ) -> bool:
        """Whether one more with this context fits for so many tokens; that one is there until then for certain."""
        growth /= stretch
        left_tokens *= stretch
        ended = int(np.searchsorted(self._ends, left_tokens, side="right"))
        if ended:
            room = self._free[:ended] - growth * self._ends[:ended]
            if context_tokens > room.min() + self._more:
                return False
        held = self._context[ended] + self._growth[ended] * left_tokens
        if self._margin:
            linear = 2 * self._linear[ended] + left_tokens * self._steep[ended]
            held += self._margin * math.sqrt(max(0.0, self._square[ended] + left_tokens * linear))
        return bool(held + context_tokens + growth * left_tokens <= self._capacity)

    def add(
        self, context_tokens: float, left_tokens: Sequence[float], stretch: float = 1.0, growth: float = 1.0
    ) -> None:
        """Count one more."""
        self._residents.append((context_tokens, left_tokens, stretch, growth))
        self._sum()


def _from(start: float, changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """`start`, and what it is after each of the changes."""
    return np.cumsum(np.concatenate(([start], changes)))
