"""Simulated annealing over the degrees of the engines (Heddle, Algorithm 2), for any score of a state.

Three moves, of which the paper gives the names; all keep the GPUs in use:

- split: one engine becomes engines of the next smaller degree;
- merge: the reverse;
- redistribute: engines of one degree step down and engines of another step up, as few as make the GPUs come out even,
  so that the number of engines stays.

The paper draws its start at random and sorts it by degree, and so does this; the states that are known beforehand are
starts as well, and the walk begins at the best.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from heddle_dask.strategies.tp_degrees.degrees import Budget, SearchSettings, State


def anneal(
    starts: Sequence[State],
    score: Callable[[State], float],
    budget: Budget,
    settings: SearchSettings,
    rng: random.Random,
) -> dict[State, float]:
    """Score `starts` and what a walk from the best of them visits.

    Returns
    -------
    dict
        Each state that was tried and its score, in the order of the first try.
    """
    tried = {state: score(state) for state in starts}
    here = min(tried, key=lambda state: (tried[state], state))
    first = settings.first_temperature * tried[here]
    cooling = (settings.last_temperature / settings.first_temperature) ** (1 / max(1, settings.moves))
    for move in range(settings.moves):
        state = neighbour(here, budget, rng)
        if state is None:
            break
        if state not in tried:
            tried[state] = score(state)
        # The threshold form of "take it with probability exp(-rise / temperature)".
        rise = -math.log(1.0 - rng.random()) * first * cooling**move
        if tried[state] <= tried[here] + rise:
            here = state
    return tried


def sorted_start(budget: Budget, rng: random.Random) -> State:
    """Degrees drawn at random until the GPUs are used, as in the paper; a state is sorted by its form."""
    counts = [0] * len(budget.tp_degrees)
    open_degrees = list(range(len(budget.tp_degrees)))
    while open_degrees:
        at = rng.choice(open_degrees)
        counts[at] += 1
        if not budget.fits(tuple(counts)):
            counts[at] -= 1
            open_degrees.remove(at)
    return tuple(counts)


def neighbour(state: State, budget: Budget, rng: random.Random) -> State | None:
    """The state after one move: its kind drawn first, then one of that kind. None if there is no move."""
    kinds = [list(moves(state, budget)) for moves in (splits, merges, redistributions)]
    possible = [found for found in kinds if found]
    return rng.choice(rng.choice(possible)) if possible else None


def splits(state: State, budget: Budget) -> Iterator[State]:
    """One engine becomes engines of the next smaller degree."""
    for at in range(len(state) - 1):
        if state[at]:
            yield _shifted(state, budget, at, 1)


def merges(state: State, budget: Budget) -> Iterator[State]:
    """As many engines of a degree as make one of the next larger do so."""
    for at in range(len(state) - 1):
        merged = _shifted(state, budget, at, -1)
        if budget.fits(merged):
            yield merged


def redistributions(state: State, budget: Budget) -> Iterator[State]:
    """Engines of one degree step down to the next, others step up from another; their number stays."""
    steps = range(len(state) - 1)
    for down in steps:
        for up in steps:
            freed = budget.tp_degrees[down] - budget.tp_degrees[down + 1]
            taken = budget.tp_degrees[up] - budget.tp_degrees[up + 1]
            if down == up or (max(freed, taken) % min(freed, taken) and freed != taken):
                continue
            both = math.lcm(freed, taken)
            counts = list(state)
            counts[down] -= both // freed
            counts[down + 1] += both // freed
            counts[up + 1] -= both // taken
            counts[up] += both // taken
            if state[down] >= both // freed and state[up + 1] >= both // taken and budget.fits(tuple(counts)):
                yield tuple(counts)


def _shifted(state: State, budget: Budget, at: int, engines: int) -> State:
    """`state` with so many engines of degree number `at` split (merged if negative)."""
    counts = list(state)
    counts[at] -= engines
    counts[at + 1] += engines * (budget.tp_degrees[at] // budget.tp_degrees[at + 1])
    return tuple(counts)
