"""In how many seconds everything could be done: those that are under way, and those that wait, put where they belong.

The longest go to the engine where the longest are already, as many as it can do in time, then to the next one, and so
on (Heddle's presorted partition, section 4.2, by work: `engine_room`). The least time in which that takes all of them
is found by bisection. Who is a little longer than the others of its class, and what does not divide, are left out: this
is when everything would be done if all went well, and the admission takes it for its aim.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.admission.engine_backlog import BacklogLeft, iterations_of, work_s
from heddle_dask.strategies.admission.length_sums import LengthClass

_TOLERANCE, _TOLERANCE_S = 0.005, 1e-3


@dataclass(frozen=True, slots=True)
class BusyEngine:
    """An engine with what it has still to do; `capacity_tokens` of KV memory may be promised."""

    cost: EngineCost
    slots: int
    capacity_tokens: float
    left: BacklogLeft


def makespan_estimate_s(
    waiting: Sequence[LengthClass], engines: Sequence[BusyEngine], guess_s: float = 1.0
) -> float:
    """Seconds in which `waiting`, the longest first, can be done beside what the engines have to do; 0 for nobody.

    An engine that takes longer for what it has takes none of them, and does not count. O(engines log classes) for each
    of a few trials; `guess_s` spares some.
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
    """Sums over the classes, from the longest on, for each kind of engine: of work, and of what bounds iterations."""

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
        """Whether all of them can be done by then."""
        if seconds < self._longest_s:
            return False
        at = 0.0  # classes that are taken, the last one in part
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
    """How far one comes from `at` with so much room."""
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
