"""The resource manager: chooses the TP degrees of the next rollout's engines from the predicted work.

It searches with the fast score of `packing`, then places the trajectories for the few best states, every uniform one
and the running engines. So by that placement the choice never ends later than the best uniform degree, or than no
change.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence

from heddle_dask.core.errors import BadInput
from heddle_dask.strategies.partition.work import Work, WorkEngine, WorkPlan
from heddle_dask.strategies.tp_degrees.annealing import anneal, sorted_start
from heddle_dask.strategies.tp_degrees.degrees import AvailableGpus, DegreeChoice, Running, SearchSettings, State
from heddle_dask.strategies.tp_degrees.packing import Packing


def choose_degrees(
    works: Sequence[Work],
    budget: AvailableGpus,
    engines: Mapping[int, WorkEngine],
    running: Running | None = None,
    *,
    seed: int,
    settings: SearchSettings | None = None,
    told_apart: bool = True,
) -> DegreeChoice:
    """Search the TP degrees with the least makespan.

    Parameters
    ----------
    works
        The predicted work of every trajectory of the rollout.
    engines
        Cost and slots of one engine of each allowed degree.
    running
        The running engines; None: starting engines takes no time.
    told_apart
        Whether the strategies can tell long trajectories from short ones. If not, every engine gets long and short
        ones mixed and has the iterations of a long one, and `works` gives only the distribution of lengths.

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


def _prices(budget: AvailableGpus, running: Running | None) -> Callable[[State], float]:
    """Seconds of a change to a state, cached: the search prices the same states repeatedly."""

    @functools.cache
    def price_s(state: State) -> float:
        return 0.0 if running is None else running.price_s(budget.degrees_of(state))

    return price_s


def _best(final: Mapping[State, float], known: Sequence[State], mix_gain: float) -> State:
    """The state with the earliest end, or the earliest of `known` if the gain is below `mix_gain`."""
    best = min(final, key=final.__getitem__)
    plain = min((state for state in known if state in final), key=final.__getitem__, default=best)
    return plain if final[best] > (1 - mix_gain) * final[plain] else best


def _known(budget: AvailableGpus, running: Running | None) -> list[State]:
    """The reference states for the choice: uniform ones and the running one."""
    states = [state for _, state in budget.uniform()]
    if running is not None:
        states.append(budget.state_of(running.tp_degrees))
    return [state for state in dict.fromkeys(states) if any(state) and budget.fits(state)]


def _check(
    works: Sequence[Work], budget: AvailableGpus, engines: Mapping[int, WorkEngine], running: Running | None
) -> None:
    if not works:
        raise BadInput("no trajectories to choose degrees for: give at least one")
    for degree in budget.tp_degrees:
        if degree not in engines:
            raise BadInput(f"degree {degree} is allowed but has no engine cost: leave it out or give one")
        if running is not None and degree not in running.restart_s:
            raise BadInput(f"degree {degree} is allowed but has no restart seconds: give them")
