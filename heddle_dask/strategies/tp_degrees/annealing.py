"""Simulated annealing over the degrees of the engines (Heddle, Algorithm 2), for any score of a state.

Three moves with the paper's names; all keep the number of GPUs in use:

- split: one engine becomes engines of the next smaller degree;
- merge: the reverse;
- redistribute: engines of one degree get the next smaller one and engines of another the next larger one, as few as
  keep the number of GPUs, so that the number of engines stays.

As in the paper, a start is drawn at random and sorted by degree; the states known beforehand are starts as well, and
the walk begins at the best start.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from heddle_dask.strategies.tp_degrees.degrees import AvailableGpus, SearchSettings, State


def anneal(
    starts: Sequence[State],
    score: Callable[[State], float],
    budget: AvailableGpus,
    settings: SearchSettings,
    rng: random.Random,
) -> dict[State, float]:
    """Score `starts` and the states on a walk from the best of them.

    Returns
    -------
    dict
        Each tried state with its score, in the order of the first trial.
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
        # Equivalent to accepting the state with probability exp(-rise / temperature).
        rise = -math.log(1.0 - rng.random()) * first * cooling**move
        if tried[state] <= tried[here] + rise:
            here = state
    return tried


def sorted_start(budget: AvailableGpus, rng: random.Random) -> State:
    """Degrees drawn at random until the GPUs are used, as in the paper; a state is sorted by definition."""
    counts = [0] * len(budget.tp_degrees)
    open_degrees = list(range(len(budget.tp_degrees)))
    while open_degrees:
        at = rng.choice(open_degrees)
        counts[at] += 1
        if not budget.fits(tuple(counts)):
            counts[at] -= 1
            open_degrees.remove(at)
    return tuple(counts)


def neighbour(state: State, budget: AvailableGpus, rng: random.Random) -> State | None:
    """The state after a random move: its kind is drawn first. None if there is no move."""
    kinds = [list(moves(state, budget)) for moves in (splits, merges, redistributions)]
    possible = [found for found in kinds if found]
    return rng.choice(rng.choice(possible)) if possible else None


def splits(state: State, budget: AvailableGpus) -> Iterator[State]:
    """One engine becomes engines of the next smaller degree."""
    for at in range(len(state) - 1):
        if state[at]:
            yield _shifted(state, budget, at, 1)


def merges(state: State, budget: AvailableGpus) -> Iterator[State]:
    """Engines of one degree become one of the next larger degree."""
    for at in range(len(state) - 1):
        merged = _shifted(state, budget, at, -1)
        if budget.fits(merged):
            yield merged


def redistributions(state: State, budget: AvailableGpus) -> Iterator[State]:
    """Engines of one degree get the next smaller one, others the next larger one; their number stays."""
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


def _shifted(state: State, budget: AvailableGpus, at: int, engines: int) -> State:
    """`state` with `engines` engines of degree number `at` split (merged if negative)."""
    counts = list(state)
    counts[at] -= engines
    counts[at + 1] += engines * (budget.tp_degrees[at] // budget.tp_degrees[at + 1])
    return tuple(counts)
