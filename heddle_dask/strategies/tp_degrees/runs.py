"""Runs of trajectories in a fixed order: the seconds of a run, and the longest run within a limit.

Both take microseconds: prefix sums give the seconds of any run (`WorkLoad.seconds`), and a bisection the longest run.
Prompts shared by the run's groups are counted exactly at the borders of up to 256 buckets and interpolated between
them: exact for up to 256 trajectories.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from heddle_dask.strategies.partition.work import Work, WorkEngine

_BUCKETS = 256


class SortedWorks:
    """Trajectories in one order, with prefix sums.

    Attributes
    ----------
    order
        Positions in the given works.
    decode, area, prefill
        Sums over the first i trajectories: tokens, token-iterations, own prompt tokens.
    longest
        For each first trajectory of a run: maximum tokens of any trajectory in the run (an upper bound).
    """

    def __init__(self, works: Sequence[Work], order: Sequence[int]) -> None:
        self.order = order
        self.decode, self.area, self.prefill = [0.0], [0.0], [0.0]
        for i in order:
            work = works[i]
            self.decode.append(self.decode[-1] + work.decode_tokens)
            self.area.append(self.area[-1] + work.area)
            self.prefill.append(self.prefill[-1] + work.prefill_tokens)
        self.longest = [0.0] * (len(order) + 1)
        for at in range(len(order) - 1, -1, -1):
            self.longest[at] = max(self.longest[at + 1], works[order[at]].decode_tokens)
        self.width = -(-len(order) // _BUCKETS)
        self.shared = self._shared_tokens(works)

    def _shared_tokens(self, works: Sequence[Work]) -> list[list[float]]:
        """Shared prompt tokens of the groups with a member from bucket a to before bucket b.

        A trajectory counts for runs that begin after the one before it of its group and end after itself. All of a
        group count with the longest prompt that any of them names, so that none is counted too short.
        """
        prompt: dict[str, float] = {}
        for work in works:
            prompt[work.group] = max(prompt.get(work.group, 0.0), work.shared_tokens)
        buckets = -(-len(self.order) // self.width)
        change = [[0.0] * (buckets + 2) for _ in range(buckets + 2)]
        before: dict[str, int] = {}
        for at, i in enumerate(self.order):
            begin, own = before.get(works[i].group, -1) // self.width + 1, at // self.width
            if begin <= own:
                change[begin][own + 1] += prompt[works[i].group]
                change[own + 1][own + 1] -= prompt[works[i].group]
            before[works[i].group] = at
        rows: list[list[float]] = []
        column = [0.0] * (buckets + 2)
        for row in change:
            column = [old + new for old, new in zip(column, row, strict=True)]
            total, sums = 0.0, []
            for value in column:
                total += value
                sums.append(total)
            rows.append(sums)
        return rows


class Reach:
    """How far a run may go on one engine within one limit.

    Parameters
    ----------
    stops
        Positions that no run gets past, rising: trajectories too slow for the engine even alone.
    """

    def __init__(self, engine: WorkEngine, works: SortedWorks, limit_s: float, stops: Sequence[int]) -> None:
        self._engine, self._works, self._limit_s, self._stops = engine, works, limit_s, stops
        self._known: dict[int, int] = {}

    def end(self, begin: int) -> int:
        """The largest end of a run from `begin` that stays within the limit."""
        found = self._known.get(begin)
        if found is None:
            found = self._known[begin] = self._search(begin)
        return found

    def _search(self, begin: int) -> int:
        # Written out in one piece: it is the inner loop of the whole search.
        works, cost, slots, limit_s = self._works, self._engine.cost, self._engine.slots, self._limit_s
        decode, area, prefill, width = works.decode, works.area, works.prefill, works.width
        longest, decode_0, area_0, prefill_0 = (
            works.longest[begin],
            decode[begin],
            area[begin],
            prefill[begin],
        )
        row, into = divmod(begin, width)
        upper, lower, weight = works.shared[row], works.shared[row + 1], into / width
        fixed_s, prompt_s, capacity = cost.fixed_s, cost.prefill_token_s, cost.capacity_tokens
        token_s, area_s = cost.token_s + cost.sequence_s, cost.context_token_s
        at = bisect_left(self._stops, begin)
        low = begin
        high = self._stops[at] if at < len(self._stops) else len(works.order)
        while low < high:
            end = (low + high + 1) // 2
            tokens, held = decode[end] - decode_0, area[end] - area_0
            column, beyond = divmod(end, width)
            part = beyond / width
            first = upper[column] + part * (upper[column + 1] - upper[column])
            last = lower[column] + part * (lower[column + 1] - lower[column])
            seconds = (
                fixed_s * max(longest, tokens / slots, held / capacity)
                + token_s * tokens
                + area_s * held
                + prompt_s * (prefill[end] - prefill_0 + first + weight * (last - first))
            )
            if seconds <= limit_s:
                low = end
            else:
                high = end - 1
        return low
