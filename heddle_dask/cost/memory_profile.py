"""Forecast of an engine's KV usage: does one more context fit, from now until it ends?

Trajectories that start together grow together. Admission by present contexts overfills the memory later; admission by
final contexts leaves memory unused until then. So usage is forecast over time. All trajectories are assumed to generate
at one pace. After t more tokens a running trajectory holds ``context + growth * t``, with its own growth, and a
finished one holds nothing (as in the future part of LightLLM's "past-future" scheduler). Time is counted in generated
tokens; a trajectory that spends part of it in tools grows more slowly.

Remaining lengths are random: each is given as a few equally likely lengths. Assuming that every trajectory ends at its
mean overestimates peak usage, because by then some have already ended. Usage after t tokens is a sum with a mean and,
assuming independence, a variance; `margin` standard deviations are kept free. Between two ends the usage rises, so it
is enough to check just before every end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray


class MemoryProfile:
    """Forecast KV usage of the trajectories on one engine (its residents).

    After t more tokens, until the next end, mean usage is the sum of p(context + growth * t) over the residents, where
    p is the probability that a resident is still running. Its variance is the sum of p(1 - p)(context + growth * t)**2,
    kept as three sums: of growth squared, of growth times context, and of context squared.

    Parameters
    ----------
    capacity_tokens
        KV capacity in tokens.
    residents
        Per resident: its context; its possible remaining lengths (at least one, equally likely, ascending); its
        stretch, the time that it stays over the time that its tokens take (1 without tool calls); its growth, the
        context tokens added per generated token.
    margin
        Standard deviations of the usage that are kept free.
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
        """Compute the free tokens just before each end, and the usage sums after it."""
        self._more = 0.0  # capacity added since these sums were computed
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
        # Each end is one of the possible lengths of a resident; `alive` of its lengths had not passed before it.
        passed = np.arange(len(lefts)) - np.repeat(np.cumsum(counts) - counts, counts)
        alive = count - passed[order]
        less = (2 * alive - 1 - count) / (count * count)  # q(1 - q) - p(1 - p)
        self._context = _from(contexts.sum(), -context / count)
        self._growth = _from(growths.sum(), -growth / count)
        self._square = _from(0.0, less * context * context)
        self._linear = _from(0.0, less * context * growth)
        self._steep = _from(0.0, less * growth * growth)
        variance = self._square[:-1] + ends * (2 * self._linear[:-1] + ends * self._steep[:-1])
        held = self._context[:-1] + self._growth[:-1] * ends + self._margin * np.sqrt(np.maximum(0.0, variance))
        self._free = self._capacity - held
        # Of simultaneous ends only the first counts: usage just before it includes all of them.
        self._free[1:][ends[1:] == ends[:-1]] = math.inf
        self._ends = ends

    def set_capacity(self, capacity_tokens: float) -> None:
        """Set another KV capacity. O(1)."""
        self._more += capacity_tokens - self._capacity
        self._capacity = capacity_tokens

    def fits(self, context_tokens: float, left_tokens: float, stretch: float = 1.0, growth: float = 1.0) -> bool:
        """Whether one more context fits for `left_tokens` more tokens, taken as certain."""
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
        self._residents.append((context_tokens, left_tokens, stretch, growth))
        self._sum()


def _from(start: float, changes: NDArray[np.float64]) -> NDArray[np.float64]:
    """`start` and its value after each of the changes."""
    return np.cumsum(np.concatenate(([start], changes)))
