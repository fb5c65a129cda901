"""The state that packs earliest, of all states: dynamic programming over the GPUs spent.

Under a limit, let reach(g) be the most trajectories, in their order, that engines of g GPUs take. A run that begins
later ends no earlier, so only the furthest reach has to be kept. With degrees from the largest to
the smallest::

    reach(g) = max over counts c of degree d:  end of c runs of d from reach(g - c·d) without d

Feasible or not, for one limit: so a bisection gives the earliest end of any state. It holds for the score of `packing`
only. The annealing works with any score and comes first; this then proves that no state is earlier, or finds one.

With engines that run, a restart is priced by the slowest degree that grows: each price is tried, and degrees that cost
more may only shrink.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from heddle_dask.strategies.tp_degrees.degrees import Budget, Running, State
from heddle_dask.strategies.tp_degrees.packing import Packing


def earliest_state(packing: Packing, budget: Budget, running: Running | None, below_s: float) -> State | None:
    """The state of the least seconds and price together, all GPUs used; None if none is below `below_s`."""
    best: State | None = None
    for price_s, growing in _growths(budget, running):
        most = _most(budget, running, growing)
        low, high = 0, packing.step_below(below_s, price_s) + 1
        # What is sought is rare: the last step first, bisection only below a find.
        middle = high - 1
        while low < high:
            state = _within(packing, budget, most, middle)
            if state is None:
                low = middle + 1
            else:
                best, high = budget.filled(state, growing), middle
                below_s = packing.limit_s(middle) + price_s
            middle = (low + high) // 2
    return best


def _growths(budget: Budget, running: Running | None) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Each price of a change and the degrees that may grow for it."""
    if running is None:
        yield 0.0, budget.tp_degrees
        return
    for price_s in sorted(dict.fromkeys([0.0, *(running.restart_s[d] for d in budget.tp_degrees)])):
        yield price_s, tuple(d for d in budget.tp_degrees if running.restart_s[d] <= price_s)


def _most(budget: Budget, running: Running | None, growing: Sequence[int]) -> State:
    """Most engines of each degree."""
    return tuple(
        budget.usable(d) // d if running is None or d in growing else running.tp_degrees.count(d)
        for d in budget.tp_degrees
    )


def _within(packing: Packing, budget: Budget, most: State, step: int) -> State | None:
    """A state whose engines end within the limit of `step`, if there is one."""
    for order in range(packing.orders):
        # For each number of GPUs spent: how far they reach, and the state that does.
        cells: dict[int, tuple[int, State]] = {0: (0, (0,) * len(budget.tp_degrees))}
        for at, degree in enumerate(budget.tp_degrees):
            end_of = packing.reach(order, degree, step).end
            widened = dict(cells)
            for spent, (begin, state) in _undominated(cells):
                count = min(most[at], (budget.usable(degree) - spent) // degree)
                end = begin
                for used in range(1, count + 1):
                    end = end_of(end)
                    known = widened.get(spent + used * degree)
                    if known is None or end > known[0]:
                        found = (*state[:at], used, *state[at + 1 :])
                        if end == packing.trajectories:
                            return found
                        widened[spent + used * degree] = (end, found)
            cells = widened
    return None


def _undominated(cells: dict[int, tuple[int, State]]) -> Iterator[tuple[int, tuple[int, State]]]:
    """Cells that reach further than every cell of fewer GPUs."""
    furthest = -1
    for spent in sorted(cells):
        if cells[spent][0] > furthest:
            furthest = cells[spent][0]
            yield spent, cells[spent]
