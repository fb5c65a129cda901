"""Estimated makespan of the running and the waiting trajectories under a good assignment to engines.

The longest waiting trajectories go to the engine with the longest residents, as many as it can finish in time, then to
the next engine, and so on (Heddle's presorted partition, section 4.2, by work: `engine_backlog`). Bisection finds the
least time in which all can be assigned. Differences within a length class and fractions of trajectories are neglected:
the estimate is optimistic, and the admission uses it as a deadline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.deadline.engine_backlog import BacklogLeft, iterations_of, work_s
from benchmarks.deadline.length_sums import LengthClass
from heddle_dask.cost.engine_cost import EngineCost

_TOLERANCE, _TOLERANCE_S = 0.005, 1e-3


@dataclass(frozen=True, slots=True)
class BusyEngine:
    """An engine with its backlog; `capacity_tokens` of its KV memory may be reserved."""

    cost: EngineCost
    slots: int
    capacity_tokens: float
    left: BacklogLeft


def makespan_estimate_s(waiting: Sequence[LengthClass], engines: Sequence[BusyEngine], guess_s: float = 1.0) -> float:
    """Seconds in which the `waiting` trajectories, longest first, can end beside the backlogs; 0 if none waits.

    An engine that needs longer for its backlog takes none of them and is ignored. O(engines log classes) for each of a
    few trials; a good `guess_s` saves some.
    """
    if not waiting or not engines:
        return 0.0
    order = sorted(engines, key=lambda e: (e.cost.decode_token_s(1, 0), -e.left.longest))
    plan = _Plan(waiting, order)
    low, high = 0.0, max(guess_s, 1e-6)
    while not plan.feasible(high):
        low, high = high, 2 * high
    if low == 0.0 and plan.feasible(high / 2):
        high /= 2
    while high - low > max(_TOLERANCE * high, _TOLERANCE_S):
        middle = (low + high) / 2
        if plan.feasible(middle):
            high = middle
        else:
            low = middle
    return high


class _Plan:
    """Prefix sums over the classes, longest first, for each kind of engine: of work, and of bounds of iterations."""

    def __init__(self, waiting: Sequence[LengthClass], engines: Sequence[BusyEngine]) -> None:
        self._engines = engines
        self._count = len(waiting)
        self._tokens = [one.items.tokens / one.members for one in waiting]
        self._tools_s = [one.items.tools_s / one.members for one in waiting]
        alone_s = min(e.cost.decode_token_s(1, 0) for e in engines)
        paths = zip(self._tokens, self._tools_s, strict=True)
        self._longest_s = max(tokens * alone_s + tools_s for tokens, tools_s in paths)
        kinds = {(e.cost, e.slots, e.capacity_tokens) for e in engines}
        self._sums = {kind: _sums(waiting, *kind) for kind in kinds}

    def feasible(self, seconds: float) -> bool:
        """Whether all waiting trajectories can end within `seconds`."""
        if seconds < self._longest_s:
            return False
        at = 0.0  # number of assigned classes, with the fraction of the last one
        for engine in self._engines:
            first = min(int(at), self._count - 1)
            least = iterations_of(self._tokens[first], self._tools_s[first], seconds)
            longest = max(engine.left.longest, least)
            fixed_s = engine.cost.fixed_s
            work, by_slots, by_memory = self._sums[engine.cost, engine.slots, engine.capacity_tokens]
            room_s = seconds - engine.left.work_s
            ends = (
                _reach(work, at, room_s - fixed_s * longest),
                _reach(by_slots, at, room_s - engine.left.slots_s),
                _reach(by_memory, at, room_s - engine.left.memory_s),
            )
            at = max(at, min(ends))
            if at >= self._count:
                return True
        return False


def _sums(
    waiting: Sequence[LengthClass], cost: EngineCost, slots: int, capacity_tokens: float
) -> tuple[list[float], list[float], list[float]]:
    items = [one.items for one in waiting]
    work = [work_s(cost, item.tokens, item.observation_tokens, item.area) for item in items]
    by_slots = [w + cost.fixed_s * item.tokens / slots for w, item in zip(work, items, strict=True)]
    by_memory = [w + cost.fixed_s * item.held / capacity_tokens for w, item in zip(work, items, strict=True)]
    every = [list(accumulate(seconds, initial=0.0)) for seconds in (work, by_slots, by_memory)]
    return every[0], every[1], every[2]


def _reach(sums: list[float], at: float, room: float) -> float:
    """The position in the classes that is reached from `at` with `room` more."""
    if room <= 0:
        return at
    last = len(sums) - 1
    i = min(int(at), last)
    here = sums[i] if i == last else sums[i] + (at - i) * (sums[i + 1] - sums[i])
    limit = here + room
    if limit >= sums[last]:
        return float(last)
    j = bisect_right(sums, limit) - 1
    step = sums[j + 1] - sums[j]
    return j + ((limit - sums[j]) / step if step > 0 else 0.0)
