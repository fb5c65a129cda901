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
from itertools import chain

import numpy as np
from numpy.typing import NDArray


class MemoryProfile:
    """The residents of one engine, by what they hold and what they may have left.

    After g more tokens, until the next end, ``context + growth * g * alive`` is held in the mean. The variance has the
    sums of p(1 - p) over the residents, plain, times context, and times its square, where p is how likely one is still
    there.

    Parameters
    ----------
    capacity_tokens
        Tokens that may be held at any time.
    growth
        Context tokens that come with each generated one.
    residents
        Context of each, and the tokens that it may have left: at least one length, equally likely, ascending.
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
        contexts = np.array([context for context, _ in self._residents])
        counts = np.array([len(lefts) for _, lefts in self._residents], dtype=np.int64)
        lefts = np.fromiter(chain.from_iterable([lefts for _, lefts in self._residents]), np.float64)
        order = np.argsort(lefts, kind="stable")
        ends = lefts[order]
        context, count = np.repeat(contexts, counts)[order], np.repeat(counts, counts)[order]
        # With each end one of the lengths of a resident has passed, and as many as `alive` had not before it.
        passed = np.arange(len(lefts)) - np.repeat(np.cumsum(counts) - counts, counts)
        alive = count - passed[order]
        less = (2 * alive - 1 - count) / (count * count)  # q(1 - q) - p(1 - p)
        self._context = _from(contexts.sum(), -context / count)
        self._alive = _from(float(len(contexts)), -1.0 / count)
        self._plain = _from(0.0, less)
        self._linear = _from(0.0, less * context)
        self._square = _from(0.0, less * context * context)
        grown = self._growth * ends
        variance = self._square[:-1] + grown * (2 * self._linear[:-1] + grown * self._plain[:-1])
        held = (
            self._context[:-1] + self._alive[:-1] * grown + self._margin * np.sqrt(np.maximum(0.0, variance))
        )
        room = self._capacity - held - grown
        room[1:][ends[1:] == ends[:-1]] = math.inf  # of those that end together the first knows what all held
        self._leasts = np.minimum.accumulate(room)
        self._ends: list[float] = ends.tolist()

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
        held = self._context[ended] + self._alive[ended] * grown
        if self._margin:
            variance = self._square[ended] + grown * (2 * self._linear[ended] + grown * self._plain[ended])
            held += self._margin * math.sqrt(max(0.0, variance))
        return bool(held + context_tokens + grown <= self._capacity)

    def add(self, context_tokens: float, left_tokens: Sequence[float]) -> None:
        """Count one more."""
        self._residents.append((context_tokens, left_tokens))
        self._sum()


def _from(start: float, changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """`start`, and what it is after each of the changes."""
    return np.cumsum(np.concatenate(([start], changes)))
