"""Local search on a plan by work: the worst engine gives one trajectory away, or swaps one, while that helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heddle_dask.strategies.partition.work import Work, WorkLoad

# Giving is tried for the longest members and for some of every length: trying all is O(n²) on a large engine.
_LONGEST = 4
_SAMPLED = 12


def improve(
    works: Sequence[Work], empty: Sequence[Callable[[], WorkLoad]], engine_of: Sequence[int], moves: int
) -> tuple[float, tuple[int, ...]]:
    """Makespan and plan after at most `moves` strict improvements; never worse than it began.

    Parameters
    ----------
    empty
        For each engine, a maker of its load before the plan.
    """
    plan = list(engine_of)
    members: list[list[int]] = [[] for _ in empty]
    for i in sorted(range(len(works)), key=lambda i: (-works[i].decode_tokens, i)):
        members[plan[i]].append(i)
    loads = [_load(make, works, own) for make, own in zip(empty, members, strict=True)]
    for _ in range(moves):
        worst = max(range(len(loads)), key=lambda j: loads[j].seconds)
        change = _best_change(works, empty, members, loads, worst)
        if change is None:
            break
        given, other, taken = change
        _reassign(works, members, given, worst, other)
        plan[given] = other
        if taken is not None:
            _reassign(works, members, taken, other, worst)
            plan[taken] = worst
        for j in (worst, other):
            loads[j] = _load(empty[j], works, members[j])
    return max(load.seconds for load in loads), tuple(plan)


def _best_change(
    works: Sequence[Work],
    empty: Sequence[Callable[[], WorkLoad]],
    members: Sequence[Sequence[int]],
    loads: Sequence[WorkLoad],
    worst: int,
) -> tuple[int, int, int | None] | None:
    """The gift or swap that lowers the later of the two ends most: (given, other engine, taken or None)."""
    least = loads[worst].seconds * (1 - 1e-9)
    best: tuple[int, int, int | None] | None = None
    for given in _some(members[worst]):
        without = _load(empty[worst], works, [i for i in members[worst] if i != given])
        if without.seconds >= least:
            continue
        for other, load in enumerate(loads):
            if other == worst:
                continue
            end = max(without.seconds, load.seconds_with(works[given]))
            if end < least:
                least, best = end, (given, other, None)
            if load.seconds >= least or len(members[other]) > _LONGEST + _SAMPLED:
                continue
            for taken in members[other]:
                left = _load(empty[other], works, [i for i in members[other] if i != taken])
                end = max(without.seconds_with(works[taken]), left.seconds_with(works[given]))
                if end < least:
                    least, best = end, (given, other, taken)
    return best


def _some(members: Sequence[int]) -> list[int]:
    """The longest members and an even sample of the rest (members are sorted by length)."""
    rest = members[_LONGEST:]
    step = max(1, -(-len(rest) // _SAMPLED))
    return [*members[:_LONGEST], *rest[::step]]


def _load(make: Callable[[], WorkLoad], works: Sequence[Work], members: Sequence[int]) -> WorkLoad:
    load = make()
    for i in members:
        load.add(works[i])
    return load


def _reassign(works: Sequence[Work], members: Sequence[list[int]], i: int, old: int, new: int) -> None:
    members[old].remove(i)
    members[new].append(i)
    members[new].sort(key=lambda k: (-works[k].decode_tokens, k))
