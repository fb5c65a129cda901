"""What a placement of a whole batch costs, and what it is worth: one row per number of trajectories and engines.

Lengths are log-normal and shared in part by the 16 members of a group; engines are H100s with Qwen3-14B, 100 slots
each, at degree 4, and for the unlike ones at 8, 4, 2 and 1 in equal parts. All algorithms get the same sorted input in
one run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from heddle_dask.cost.engine_cost import EngineCost, load_profile
from heddle_dask.strategies.partition.interference import worker_of
from heddle_dask.strategies.partition.makespan import partition_in_order
from heddle_dask.strategies.partition.presorted import presorted_dp, presorted_dp_by_bisection
from heddle_dask.strategies.partition.runs import Partition, Presorted, Worker
from heddle_dask.strategies.partition.unlike import partition_unlike
from heddle_dask.strategies.partition.work import Work, WorkLoad
from heddle_dask.strategies.partition.work_plan import WorkEngine, plan_by_work

PROFILE = "qwen3-14b-h100"
DEGREES = (8, 4, 2, 1)
SLOTS = 100
GROUP = 16
PROMPT_TOKENS = 600
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """Milliseconds are of CPU time (one thread; what else runs on the machine does not count), medians over the
    repeats. Makespans are the models' own, not measured rollouts.

    Attributes
    ----------
    dp_ms
        Eq. 3 as printed; None where it was left out as too slow.
    cut_ms
        Eq. 3 with bisection over the cut.
    makespan_ms
        Bisection over the makespan, same value.
    dp_over_makespan
        ``dp_ms / makespan_ms``.
    unlike_ms
        Unlike workers, all orders.
    fixed_order_over_best
        Makespan of the paper's order (fastest first) over the best order's, by Eq. 2.
    work_ms
        The plan by work, equal engines.
    eq3_over_work
        Makespan by work of the partition of Eq. 3 over that of the plan by work.
    work_bound_share
        Lower bound (longest path alone, or all work shared out evenly) over the makespan of the plan by work.
    """

    trajectories: int
    engines: int
    dp_ms: float | None
    cut_ms: float
    makespan_ms: float
    dp_over_makespan: float | None
    unlike_ms: float
    fixed_order_over_best: float
    work_ms: float
    eq3_over_work: float
    work_bound_share: float


def measure_placement(
    trajectories: Sequence[int], engines: Sequence[int], *, seed: int, repeats: int, dp_most: int
) -> Iterator[PlacementRow]:
    """Measure every pair of counts; pairs with fewer trajectories than engines are left out.

    Parameters
    ----------
    dp_most
        Largest number of trajectories for which Eq. 3 runs as printed: it is quadratic.
    """
    for count in trajectories:
        works = synthetic_works(count, seed)
        for number in engines:
            if number <= count:
                yield _row(works, number, repeats, with_dp=count <= dp_most)


def synthetic_works(count: int, seed: int) -> list[Work]:
    """`count` trajectories from the longest to the shortest."""
    rng = random.Random(seed)
    works: list[Work] = []
    for i in range(count):
        if i % GROUP == 0:
            group_tokens = rng.lognormvariate(7.5, 0.8)
        tokens = group_tokens * rng.lognormvariate(0, 0.6)
        works.append(Work(f"g{i // GROUP}", tokens, PROMPT_TOKENS, PROMPT_TOKENS))
    return sorted(works, key=lambda work: -work.decode_tokens)


def _row(works: list[Work], number: int, repeats: int, *, with_dp: bool) -> PlacementRow:
    lengths = [work.decode_tokens for work in works]
    context = PROMPT_TOKENS + statistics.fmean(lengths) / 2
    kinds = {d: _worker(d, context, len(works)) for d in DEGREES}
    equal = [kinds[4]] * number
    unlike = [kinds[DEGREES[j * len(DEGREES) // number]] for j in range(number)]
    table = kinds[4].token_s
    dp_ms, dp = _timed(lambda: presorted_dp(lengths, table, number), 1) if with_dp else (None, None)
    cut_ms, cut = _timed(lambda: presorted_dp_by_bisection(lengths, table, number), repeats)
    makespan_ms, packed = _timed(lambda: partition_in_order(Presorted(lengths), equal), repeats)
    unlike_ms, best = _timed(lambda: partition_unlike(Presorted(lengths), unlike), repeats)
    fixed = partition_in_order(Presorted(lengths), unlike)
    sites = [WorkEngine(_cost(4), SLOTS)] * number
    work_ms, plan = _timed(lambda: plan_by_work(works, sites), repeats)
    assert packed is not None and best is not None and fixed is not None
    if packed.seconds != cut.seconds or (dp is not None and packed.seconds != dp.seconds):
        raise RuntimeError(f"{len(works)} on {number}: the algorithms for Eq. 3 disagree")
    return PlacementRow(
        trajectories=len(works),
        engines=number,
        dp_ms=None if dp_ms is None else round(dp_ms, 3),
        cut_ms=round(cut_ms, 3),
        makespan_ms=round(makespan_ms, 3),
        dp_over_makespan=None if dp_ms is None else round(dp_ms / makespan_ms, 1),
        unlike_ms=round(unlike_ms, 3),
        fixed_order_over_best=round(fixed.seconds / best.seconds, 4),
        work_ms=round(work_ms, 3),
        eq3_over_work=round(_by_work_s(packed, works) / plan.seconds, 4),
        work_bound_share=round(_bound_s(works, number) / plan.seconds, 4),
    )


def _cost(degree: int) -> EngineCost:
    return load_profile(PROFILE, degree)


def _worker(degree: int, context_tokens: float, most: int) -> Worker:
    return worker_of(_cost(degree), SLOTS, context_tokens=context_tokens, most=most)


def _timed(call: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Median CPU milliseconds and the result."""
    took_ms = []
    for _ in range(repeats):
        began_s = time.process_time()
        result = call()
        took_ms.append(1000 * (time.process_time() - began_s))
    return statistics.median(took_ms), result


def _by_work_s(partition: Partition, works: Sequence[Work]) -> float:
    cost = _cost(4)
    return max(WorkLoad.of(cost, SLOTS, works[run.start : run.stop]).seconds for run in partition.runs)


def _bound_s(works: Sequence[Work], engines: int) -> float:
    """No plan on equal engines is shorter: every slot of every engine busy all the time, or one long path."""
    cost = _cost(4)
    alone_s = max(work.path_s(cost) for work in works)
    everything = WorkLoad.of(cost, SLOTS, works)
    everything.longest_tokens = everything.path_s = 0.0
    return max(alone_s, everything.seconds / engines)


def as_json(rows: Sequence[PlacementRow]) -> dict[str, object]:
    """The JSON object of ``heddle bench placement``."""
    return {"rows": [asdict(row) for row in rows]}
