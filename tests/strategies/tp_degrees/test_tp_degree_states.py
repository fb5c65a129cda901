"""Budgets against brute-force packing of nodes, the three moves, and settings."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.strategies.tp_degrees.annealing import (
    merges,
    neighbour,
    redistributions,
    sorted_start,
    splits,
)
from heddle_dask.strategies.tp_degrees.degrees import AvailableGpus, SearchSettings, State, allowed_degrees

degree_sets = st.sampled_from([(8, 4, 2, 1), (4, 2), (8, 1), (6, 3, 1), (2,), (1,)])
budgets = st.builds(
    AvailableGpus, gpus=st.integers(8, 40), gpus_per_node=st.sampled_from([8, 6]), tp_degrees=degree_sets
)


def room_for(degrees: tuple[int, ...], nodes: tuple[int, ...]) -> bool:
    """Brute force: whether the engines can be laid into nodes with so many free GPUs."""
    if not degrees:
        return True
    return any(
        room_for(degrees[1:], tuple(sorted((*nodes[:at], free - degrees[0], *nodes[at + 1 :]))))
        for at, free in enumerate(nodes)
        if free >= degrees[0] and free not in nodes[:at]
    )


@given(
    st.integers(1, 13),
    st.sampled_from([4, 6]),
    st.sampled_from([(4, 2, 1), (2, 1), (6, 3, 1), (6, 2)]),
    st.data(),
)
def test_a_state_fits_exactly_when_its_engines_can_be_laid_into_nodes(
    gpus: int, per_node: int, degrees: tuple[int, ...], data: st.DataObject
) -> None:
    whole, rest = divmod(gpus, per_node)
    nodes = tuple(sorted([*[per_node] * whole, rest]))
    if not any(free >= degrees[-1] for free in nodes):
        with pytest.raises(BadInput, match="does not fit"):
            AvailableGpus(gpus, per_node, degrees)
        return
    budget = AvailableGpus(gpus, per_node, degrees)
    state = data.draw(st.tuples(*(st.integers(0, gpus // d) for d in degrees)))
    assert budget.fits(state) == room_for(budget.degrees_of(state), nodes)


def gpus_of(state: State, budget: AvailableGpus) -> int:
    return sum(budget.degrees_of(state))


@given(budgets, st.integers(0, 1_000))
def test_moves_keep_the_gpus_and_fit(budget: AvailableGpus, seed: int) -> None:
    rng = random.Random(seed)
    state = sorted_start(budget, rng)
    engines, gpus = sum(state), gpus_of(state, budget)
    for moves, sign in ((splits, 1), (merges, -1), (redistributions, 0)):
        for moved in moves(state, budget):
            assert budget.fits(moved) and gpus_of(moved, budget) == gpus and moved != state
            change = sum(moved) - engines
            assert (change > 0) - (change < 0) == sign
    for split in splits(state, budget):
        assert state in list(merges(split, budget))
    for moved in redistributions(state, budget):
        assert state in list(redistributions(moved, budget))


def test_moves_by_example() -> None:
    budget = AvailableGpus(16)
    assert list(splits((1, 1, 0, 4), budget)) == [(0, 3, 0, 4), (1, 0, 2, 4)]
    assert list(merges((1, 1, 0, 4), budget)) == [(1, 1, 1, 2)]
    # One of 8 steps down to 4 and four of 1 step up to 2.
    assert (0, 2, 4, 0) in list(redistributions((1, 1, 0, 4), budget))


def test_a_state_without_moves_stays() -> None:
    assert neighbour((3,), AvailableGpus(3, tp_degrees=(1,)), random.Random(0)) is None


def test_uniform_states_and_what_they_leave() -> None:
    budget = AvailableGpus(12, gpus_per_node=8)
    assert dict(budget.uniform()) == {8: (1, 0, 0, 0), 4: (0, 3, 0, 0), 2: (0, 0, 6, 0), 1: (0, 0, 0, 12)}
    assert budget.state_of((8, 2, 2)) == (1, 0, 2, 0)
    assert [degree for degree, _ in AvailableGpus(4).uniform()] == [4, 2, 1]


def test_degrees_divide_the_heads_and_fit_the_node() -> None:
    assert allowed_degrees(40, 8) == (8, 4, 2, 1)
    assert allowed_degrees(12, 8) == (4, 2, 1)
    assert allowed_degrees(64, 4) == (4, 2, 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AvailableGpus(0), "use at least 1"),
        (lambda: AvailableGpus(8, tp_degrees=()), "use at least one"),
        (lambda: AvailableGpus(8, tp_degrees=(0, 1)), "none below 1"),
        (lambda: AvailableGpus(8, tp_degrees=(2, 3)), "each must divide"),
        (lambda: AvailableGpus(4, tp_degrees=(8,)), "does not fit 4 GPUs"),
        (lambda: allowed_degrees(0, 8), "0 heads"),
        (lambda: SearchSettings(moves=-1), "-1 moves"),
        (lambda: SearchSettings(finalists=0), "0 finalists"),
        (lambda: SearchSettings(last_temperature=1.0), "falling pair"),
        (lambda: SearchSettings(grid=1.0), "ratio above 1"),
    ],
)
def test_bad_budgets_and_settings_are_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(BadInput, match=words):
        make()
