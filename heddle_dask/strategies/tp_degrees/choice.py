"""The resource manager: which TP degrees the engines of the next rollout get, given the predicted work.

Searches with the quick score of `packing`, then places the trajectories for the few best states, every uniform one and
what runs now. So the choice is never later than the best uniform degree, or than no change, by that placement.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence

from heddle_dask.core.errors import BadInput
from heddle_dask.strategies.partition.work import Work
from heddle_dask.strategies.partition.work_plan import WorkEngine, WorkPlan
from heddle_dask.strategies.tp_degrees.annealing import anneal, sorted_start
from heddle_dask.strategies.tp_degrees.covering import earliest_state
from heddle_dask.strategies.tp_degrees.degrees import Budget, DegreeChoice, Running, SearchSettings, State
from heddle_dask.strategies.tp_degrees.packing import Packing


def choose_degrees(
    works: Sequence[Work],
    budget: Budget,
    engines: Mapping[int, WorkEngine],
    running: Running | None = None,
    *,
    seed: int,
    settings: SearchSettings | None = None,
    told_apart: bool = True,
) -> DegreeChoice:
    """Search the degrees under which the last trajectory ends earliest.

    Parameters
    ----------
    works
        The predicted work of every trajectory of the rollout.
    engines
        For each allowed degree, cost and slots of one engine.
    running
        What runs now; without it, starting engines costs nothing.
    told_apart
        Whether the strategies will know which trajectory is a long one. If not, every engine pays the fixed part of a
        long one's iterations, and `works` only gives the spread of lengths: long and short ones mixed.

    Raises
    ------
    BadInput
        No trajectories, or a degree without cost or restart seconds.
    """
    settings = settings or SearchSettings()
    _check(works, budget, engines, running)
    rng = random.Random(seed)
    packing = Packing(works, budget, engines, settings.grid, told_apart=told_apart)
    price_s = _prices(budget, running)
    known = _known(budget, running)
    starts = list(dict.fromkeys([sorted_start(budget, rng), *known]))
    tried = anneal(starts, lambda state: packing.seconds(state) + price_s(state), budget, settings, rng)
    if budget.gpus <= settings.exact_gpus:
        earlier = earliest_state(packing, budget, running, min(tried.values()))
        if earlier is not None:
            tried[earlier] = packing.seconds(earlier) + price_s(earlier)
    ends = sorted((s for s in tried if tried[s] < math.inf), key=lambda s: (tried[s], price_s(s), s))
    plans: dict[State, WorkPlan] = {}
    for state in dict.fromkeys([*ends[: settings.finalists], *(s for s in known if tried[s] < math.inf)]):
        plans[state] = packing.plan(state)
    final = {state: plan.seconds + price_s(state) for state, plan in plans.items()}
    best = _best(final, known, settings.mix_gain)
    return DegreeChoice(
        tp_degrees=budget.degrees_of(best),
        seconds=final[best],
        uniform={d: final.get(state, math.inf) for d, state in budget.uniform()},
        price_s=price_s(best),
        plan=plans[best],
        tried=len(tried),
    )


def _prices(budget: Budget, running: Running | None) -> Callable[[State], float]:
    """Seconds that a change to a state costs; the search asks for the same state again and again."""

    @functools.cache
    def price_s(state: State) -> float:
        return 0.0 if running is None else running.price_s(budget.degrees_of(state))

    return price_s


def _best(final: Mapping[State, float], known: Sequence[State], mix_gain: float) -> State:
    """The earliest to end; the earliest of `known` where it does not end clearly before that."""
    best = min(final, key=final.__getitem__)
    plain = min((state for state in known if state in final), key=final.__getitem__, default=best)
    return plain if final[best] > (1 - mix_gain) * final[plain] else best


def _known(budget: Budget, running: Running | None) -> list[State]:
    """The states that the choice must not be later than: uniform ones and what runs."""
    states = [state for _, state in budget.uniform()]
    if running is not None:
        states.append(budget.state_of(running.tp_degrees))
    return [state for state in dict.fromkeys(states) if any(state) and budget.fits(state)]


def _check(
    works: Sequence[Work], budget: Budget, engines: Mapping[int, WorkEngine], running: Running | None
) -> None:
    if not works:
        raise BadInput("no trajectories to choose degrees for: give at least one")
    for degree in budget.tp_degrees:
        if degree not in engines:
            raise BadInput(f"degree {degree} is allowed but has no engine cost: leave it out or give one")
        if running is not None and degree not in running.restart_s:
            raise BadInput(f"degree {degree} is allowed but has no restart seconds: give them")
