"""Which engines to merge, and what that is foreseen to gain: the end of the last trajectory with and without.

Without: trajectories stay where they are, or are spread anew over all engines at no price, whichever ends earlier:
migration may do as much. With: those on the merged engines' GPUs go to the others and are prefilled there; all go on
for as long as the merged engines take to start; then the longest go to these, prefilled again, as many as make both
sides end together.

Candidates are, for each larger degree, 1, 2, 4, … and all groups of engines that one node has for it, the engines with
the least to do first, and one engine at least left over. Like idle engines are interchangeable, so that nothing is
missed while only idle ones may be merged (`tests/test_regrouping.py` compares with all merges there are).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core.ids import EngineId
from heddle_dask.core.view import Merge
from heddle_dask.strategies.regrouping.foreseen import TailEngine, TailTrajectory, end_s, left_after

Residents = Mapping[EngineId, Sequence[TailTrajectory]]
_Load = tuple[int, float]


@dataclass(frozen=True, slots=True)
class MergedKind:
    """What engines may be merged to: by degree, as a `TailEngine` without a name, and seconds until one answers."""

    engine: TailEngine
    restart_s: float


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Merges, and the seconds to the last end without and with them."""

    merges: tuple[Merge, ...]
    stay_s: float
    regroup_s: float

    @property
    def gain_s(self) -> float:
        """Seconds by which the last trajectory ends earlier."""
        return self.stay_s - self.regroup_s


def staying_s(engines: Sequence[TailEngine], residents: Residents) -> float:
    """Seconds to the last end if nothing is merged."""
    stays_s = max((end_s(engine, residents[engine.engine_id]) for engine in engines), default=0.0)
    everybody = [row for engine in engines for row in residents[engine.engine_id]]
    return min(stays_s, _latest_s(engines, _spread(engines, {}, everybody)))


def regrouped_s(
    engines: Sequence[TailEngine],
    residents: Residents,
    merges: Sequence[Merge],
    kinds: Mapping[int, MergedKind],
) -> float:
    """Seconds to the last end with these merges; infinite where an engine would hold more than its KV memory meanwhile.

    Contexts would then be thrown out and prefilled again at every step, which no closed form here says.
    """
    taken = {name for merge in merges for name in merge.engine_ids}
    kept = [engine for engine in engines if engine.engine_id not in taken]
    homeless = [row for engine in engines if engine.engine_id in taken for row in residents[engine.engine_id]]
    seated = _spread(kept, residents, homeless)
    moved = {row.trajectory_id for row in homeless}
    restart_s = max(kinds[merge.tp_degree].restart_s for merge in merges)
    merged = [_unnamed(kinds[merge.tp_degree].engine, number) for number, merge in enumerate(merges)]
    latest_s = 0.0
    left: dict[EngineId, list[TailTrajectory]] = {}
    for engine in kept:
        rows = seated[engine.engine_id]
        prefills = [row.context_tokens for row in rows if row.trajectory_id in moved]
        left[engine.engine_id] = left_after(engine, rows, restart_s, prefills)
        if _overflows(engine, rows) or _overflows(engine, left[engine.engine_id]):
            return math.inf
        if len(left[engine.engine_id]) < len(rows):
            latest_s = max(latest_s, min(restart_s, end_s(engine, rows, prefills)))
    if not any(left.values()):
        return latest_s
    return restart_s + best_share(kept, left, merged)[0]


def best_share(
    kept: Sequence[TailEngine], left: Residents, merged: Sequence[TailEngine]
) -> tuple[float, list[TailTrajectory]]:
    """How many of the longest should go to the merged engines: seconds to the last end, and who goes.

    The more go, the later the merged engines end and the earlier the others: the crossing is found by bisection.
    """
    everybody = sorted(
        (row for engine in kept for row in left[engine.engine_id]),
        key=lambda row: (-row.tokens, row.trajectory_id),
    )

    def ends(count: int) -> tuple[float, float]:
        going = everybody[:count]
        gone = {row.trajectory_id for row in going}
        others_s = 0.0
        for engine in kept:
            rows = [row for row in left[engine.engine_id] if row.trajectory_id not in gone]
            others_s = max(others_s, end_s(engine, rows))
        merged_s = _latest_s(merged, _spread(merged, {}, going), prefilled=True)
        return merged_s, others_s

    low, high = 0, len(everybody)
    while low < high:  # the least count at which the merged engines end last
        middle = (low + high) // 2
        merged_s, others_s = ends(middle)
        if merged_s >= others_s:
            high = middle
        else:
            low = middle + 1
    choices = [(max(ends(count)), count) for count in {max(0, low - 1), low}]
    seconds, count = min(choices)
    return seconds, everybody[:count]


def candidates(
    engines: Sequence[TailEngine], residents: Residents, degrees: Sequence[int], *, evacuate: bool
) -> Iterator[tuple[Merge, ...]]:
    """Merges worth pricing."""
    movable = [engine for engine in engines if evacuate or not residents[engine.engine_id]]
    for degree in degrees:
        groups = _groups([engine for engine in movable if engine.degree < degree], residents, degree)
        most = len(groups)
        while most and sum(len(group.engine_ids) for group in groups[:most]) >= len(engines):
            most -= 1
        counts = {most, *(1 << power for power in range(most.bit_length()))}
        for count in sorted(counts - {0}):
            yield tuple(groups[:count])


def best_regroup(
    engines: Sequence[TailEngine],
    residents: Residents,
    kinds: Mapping[int, MergedKind],
    *,
    evacuate: bool,
) -> Foreseen | None:
    """The merges under which the last trajectory is foreseen to end earliest; None where there is nothing to merge."""
    stay_s = staying_s(engines, residents)
    best: Foreseen | None = None
    for merges in candidates(engines, residents, sorted(kinds), evacuate=evacuate):
        if min(kinds[merge.tp_degree].restart_s for merge in merges) >= stay_s:
            continue
        seconds = regrouped_s(engines, residents, merges, kinds)
        if best is None or seconds < best.regroup_s:
            best = Foreseen(merges, stay_s, seconds)
    return best


def _groups(engines: Sequence[TailEngine], residents: Residents, degree: int) -> list[Merge]:
    """For each node group after group of engines whose degrees add up, that with least to do first; so are all."""
    by_node: dict[str, list[TailEngine]] = {}
    for engine in engines:
        if engine.node:
            by_node.setdefault(engine.node, []).append(engine)
    found: list[tuple[_Load, int, Merge]] = []
    for members in by_node.values():
        waiting = members
        while (least := _adding_up(waiting, residents, degree)) is not None:
            load, group = least
            waiting = [engine for engine in waiting if engine not in group]
            found.append((load, len(found), Merge(tuple(engine.engine_id for engine in group), degree)))
    return [merge for _, _, merge in sorted(found, key=lambda one: one[:2])]


def _adding_up(
    engines: Sequence[TailEngine], residents: Residents, degree: int
) -> tuple[_Load, tuple[TailEngine, ...]] | None:
    """Those with least to do whose degrees add up to `degree`: trajectories first, then tokens; by subset sums."""
    least: dict[int, tuple[_Load, tuple[TailEngine, ...]]] = {0: ((0, 0.0), ())}
    for engine in engines:
        rows = residents[engine.engine_id]
        count, tokens = len(rows), sum(row.tokens for row in rows)
        for total, ((counts, sums), group) in list(least.items()):
            load, more = (counts + count, sums + tokens), total + engine.degree
            if more <= degree and (more not in least or load < least[more][0]):
                least[more] = load, (*group, engine)
    return least.get(degree)


def _spread(
    engines: Sequence[TailEngine], residents: Residents, rows: Sequence[TailTrajectory]
) -> dict[EngineId, list[TailTrajectory]]:
    """`rows`, the longest first, each to the engine on which a token takes least with one more; residents stay."""
    seated = {engine.engine_id: list(residents.get(engine.engine_id, ())) for engine in engines}
    context = {name: sum(row.context_tokens for row in held) for name, held in seated.items()}

    def key(number: int) -> tuple[float, int]:
        name = engines[number].engine_id
        return engines[number].token_s(len(seated[name]) + 1, context[name]), number

    heap = [key(number) for number in range(len(engines))]
    heapq.heapify(heap)
    for row in sorted(rows, key=lambda row: (-row.tokens, row.trajectory_id)):
        number = heap[0][1]
        name = engines[number].engine_id
        seated[name].append(row)
        context[name] += row.context_tokens
        heapq.heapreplace(heap, key(number))
    return seated


def _overflows(engine: TailEngine, rows: Sequence[TailTrajectory]) -> bool:
    return sum(row.context_tokens for row in rows) > engine.cost.capacity_tokens


def _latest_s(engines: Sequence[TailEngine], seated: Residents, *, prefilled: bool = False) -> float:
    latest_s = 0.0
    for engine in engines:
        rows = seated[engine.engine_id]
        latest_s = max(
            latest_s, end_s(engine, rows, [row.context_tokens for row in rows] if prefilled else ())
        )
    return latest_s


def _unnamed(engine: TailEngine, number: int) -> TailEngine:
    return replace(engine, engine_id=EngineId(f"merged {number}"))
