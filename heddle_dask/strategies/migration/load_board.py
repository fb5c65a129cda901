"""The loads of all ready engines, and the move that pays: of all targets only the few that can win are priced.

For every engine the board keeps a lower bound of the seconds that an arriving trajectory needs there. With n
residents that need R tokens in total, each of their tokens costs at least ``w = token + kv·context``, so they add at
least ``min(R·w, r·n·w)`` to the time of an arrival of r tokens alone (`EngineLoad.finish_s`, `duty` 1); queueing for
slots adds ``fixed/slots`` per token. The engine's own end without the arrival is a bound as well. Engines with
failing bounds are not priced; the others are priced in the order of their bounds until no better one is possible. The
minimum bounds of a block of engines are checked first: among a thousand engines few blocks pass. Of identical empty
engines only the first to join is considered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from heddle_dask.core.ids import EngineId
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.migration.pricing import (
    EngineLoad,
    Link,
    Margin,
    MovingCandidate,
    NoMove,
    PricedMove,
    price_move,
    price_stay,
)
from heddle_dask.strategies.partition.work import area_of, busy_s

_BLOCK = 32
_ROUNDING = 1 - 1e-9  # bounds are sums in another order than the times they bound


class LoadBoard:
    """Loads by engine number, in join order, with their bounds; each must be `set` before it is read.

    Parameters
    ----------
    engines
        Id, cost, slots and context limit of each engine.
    """

    def __init__(self, engines: Sequence[tuple[EngineId, EngineCost, int, int]]) -> None:
        self._engines = list(engines)
        self.number_of = {engine[0]: j for j, engine in enumerate(engines)}
        self.residents = [-1] * len(engines)
        self.kv_tokens = [0] * len(engines)
        self._remaining = [0.0] * len(engines)
        self._longest = [0.0] * len(engines)
        # Bounds of the module: R·w and n·w without and with queueing for slots, and the engine's own end.
        self._sum_s = [0.0] * len(engines)
        self._each_s = [0.0] * len(engines)
        self._queued_sum_s = [0.0] * len(engines)
        self._queued_each_s = [0.0] * len(engines)
        self._own_s = [0.0] * len(engines)
        # Lower bounds of these five over each block, and the blocks that changed since these were computed.
        blocks = -(-len(engines) // _BLOCK)
        self._least: list[tuple[float, float, float, float, float]] = [(0.0, 0.0, 0.0, 0.0, 0.0)] * blocks
        self._stale = dict.fromkeys(range(blocks))
        identical: dict[tuple[EngineCost, int, int], int] = {}
        self._identical = [identical.setdefault(engine[1:], len(identical)) for engine in engines]
        self._kinds = list(dict.fromkeys((cost, slots) for _, cost, slots, _ in engines))

    def set(self, j: int, residents: int, kv_tokens: int, remaining_tokens: float, longest_tokens: float) -> None:
        self.residents[j], self.kv_tokens[j] = residents, kv_tokens
        self._remaining[j], self._longest[j] = remaining_tokens, longest_tokens
        _, cost, slots, _ = self._engines[j]
        token_s = cost.token_s + cost.sequence_s
        area = 0.0
        if residents:
            mean_context = (kv_tokens + remaining_tokens / 2) / residents
            token_s += cost.context_token_s * mean_context
            area = remaining_tokens * mean_context
        queued_s = token_s + cost.fixed_s / slots
        self._sum_s[j], self._each_s[j] = remaining_tokens * token_s, residents * token_s
        self._queued_sum_s[j], self._queued_each_s[j] = remaining_tokens * queued_s, residents * queued_s
        self._own_s[j] = busy_s(cost, slots, longest_tokens, remaining_tokens, area)
        block = j // _BLOCK
        own, each, queued_each, whole, queued_whole = self._least[block]
        self._least[block] = (
            min(own, self._own_s[j]),
            min(each, self._each_s[j]),
            min(queued_each, self._queued_each_s[j]),
            min(whole, self._sum_s[j]),
            min(queued_whole, self._queued_sum_s[j]),
        )
        self._stale[block] = None

    def load(self, j: int) -> EngineLoad:
        engine_id, cost, slots, max_context = self._engines[j]
        return EngineLoad(
            engine_id,
            cost,
            slots,
            self.residents[j],
            self._remaining[j],
            self._longest[j],
            float(self.kv_tokens[j]),
            1.0,
            max_context,
        )

    def decide(
        self,
        candidate: MovingCandidate,
        link: Link | None,
        margin: Margin,
        reach: Collection[EngineId] | None = None,
    ) -> PricedMove | None:
        """The move with the earliest end of this trajectory if that is clearly earlier than staying, else None.

        With the trajectory and its recomputation added, the target must also finish all its work before the home would
        have finished with the trajectory: a move must not make another engine the last one.

        Parameters
        ----------
        link
            Connects the engines of `reach` (None: all); without one, KV cannot be transferred.
        """
        home = self.number_of.get(candidate.home)
        if home is None or candidate.remaining_tokens <= 0 or candidate.moved >= margin.max_moves:
            return None
        stay = price_stay(candidate, self.load(home), margin)
        best: PricedMove | None = None
        best_number = -1
        for bound_s, j in self._worth_pricing(candidate, home, stay):
            if best is not None and bound_s > best.move_s:
                break
            there = link if reach is None or self._engines[j][0] in reach else None
            move = price_move(candidate, self.load(j), there, margin, stay)
            if move is None:
                continue
            if best is None or (move.move_s, j) < (best.move_s, best_number):
                best, best_number = move, j
        return best

    def _worth_pricing(self, candidate: MovingCandidate, home: int, stay: NoMove) -> list[tuple[float, int]]:
        """Targets that may be clearly better, with a lower bound of the end there, earliest first."""
        remaining = candidate.remaining_tokens
        alone_s, queued_s = self._least_alone_s(remaining, candidate.context_tokens)
        most_s = stay.most_s - candidate.tool_s
        room_s = most_s / _ROUNDING - alone_s
        queued_room_s = most_s / _ROUNDING - queued_s
        if room_s < 0 or queued_room_s < 0:
            return []
        drain_s = stay.drain_s / _ROUNDING
        each_s, queued_each_s = room_s / remaining, queued_room_s / remaining

        def may_fit(bounds: tuple[float, float, float, float, float]) -> bool:
            own, each, queued_each, whole, queued_whole = bounds
            return (
                own <= drain_s
                and (each <= each_s or whole <= room_s)
                and (queued_each <= queued_each_s or queued_whole <= queued_room_s)
            )

        blocks = [block for block, least in enumerate(self._least) if may_fit(least)]
        blocks = [block for block in blocks if block not in self._stale or may_fit(self._refresh(block))]
        fitting = [
            block * _BLOCK + place
            for block in blocks
            for place, bounds in enumerate(self._bounds(block))
            if may_fit(bounds)
        ]
        found = []
        for j in self._apart(fitting, home, candidate):
            others_s = min(self._sum_s[j], remaining * self._each_s[j])
            queued_others_s = min(self._queued_sum_s[j], remaining * self._queued_each_s[j])
            bound_s = max(alone_s + others_s, queued_s + queued_others_s)
            found.append((candidate.tool_s + bound_s * _ROUNDING, j))
        found.sort()
        return found

    def _bounds(self, block: int) -> list[tuple[float, float, float, float, float]]:
        here = slice(block * _BLOCK, (block + 1) * _BLOCK)
        columns = (self._own_s, self._each_s, self._queued_each_s, self._sum_s, self._queued_sum_s)
        return list(zip(*(column[here] for column in columns), strict=True))

    def _refresh(self, block: int) -> tuple[float, float, float, float, float]:
        """Recompute the minimum bounds of a block; called only if its old bounds pass."""
        own, each, queued_each, whole, queued_whole = zip(*self._bounds(block), strict=True)
        self._least[block] = (min(own), min(each), min(queued_each), min(whole), min(queued_whole))
        del self._stale[block]
        return self._least[block]

    def _apart(self, numbers: list[int], home: int, candidate: MovingCandidate) -> list[int]:
        """These numbers without the home, and without engines identical to an earlier one."""
        apart = []
        idle: set[int] = set()
        for j in numbers:
            if j == home:
                continue
            if not (self.residents[j] or candidate.cached_tokens) and self._holds_nothing(j):
                if self._identical[j] in idle:
                    continue
                idle.add(self._identical[j])
            apart.append(j)
        return apart

    def _holds_nothing(self, j: int) -> bool:
        return not (self.residents[j] or self.kv_tokens[j] or self._remaining[j] or self._longest[j])

    def _least_alone_s(self, remaining: float, context: float) -> tuple[float, float]:
        """Minimum seconds over the kinds of engines for the arriving trajectory alone, and with queueing for slots."""
        area = area_of(remaining, context)
        alone_s = queued_s = float("inf")
        for cost, slots in self._kinds:
            work_s = (cost.token_s + cost.sequence_s) * remaining + cost.context_token_s * area
            alone_s = min(alone_s, work_s + cost.fixed_s * remaining)
            queued_s = min(queued_s, work_s + cost.fixed_s * remaining / slots)
        return alone_s, queued_s
