"""Tables of units against brute force: every prefix of the candidates has its best amounts."""

from __future__ import annotations

import itertools
from math import inf, isclose

from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.gpu_chunks import FreeChunks
from heddle_dask.core.nouns import DurationProfile
from heddle_dask.strategies.actions.unit_table import ChunkTable, UnitOptions, UnitTable

PROFILES = st.builds(DurationProfile, st.floats(0.1, 50), st.sampled_from([0.0, 0.05, 0.5, 1.0]))


def options_of(amounts: tuple[int, ...], profile: DurationProfile, weight: float = 1.0) -> UnitOptions:
    return UnitOptions(amounts, tuple(weight * profile.seconds(amount) for amount in amounts))


@st.composite
def ranges(draw: st.DrawFn) -> UnitOptions:
    least = draw(st.integers(1, 3))
    amounts = tuple(range(least, least + draw(st.integers(1, 4))))
    return options_of(amounts, draw(PROFILES), draw(st.sampled_from([1.0, 2.5])))


@st.composite
def sets(draw: st.DrawFn) -> UnitOptions:
    amounts = tuple(sorted(draw(st.sets(st.integers(1, 6), min_size=1, max_size=3))))
    costs = tuple(draw(st.floats(0, 20)) for _ in amounts)  # any costs, also ones that more units do not lower
    return UnitOptions(amounts, costs)


def brute(options: list[UnitOptions], units: int) -> float:
    ways = itertools.product(*(zip(each.amounts, each.costs, strict=True) for each in options))
    return min((sum(c for _, c in way) for way in ways if sum(a for a, _ in way) <= units), default=inf)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(ranges(), sets()), max_size=4), st.integers(0, 14))
def test_one_table_has_the_best_units_of_every_prefix(options: list[UnitOptions], units: int) -> None:
    table = UnitTable(options, units)
    for count in range(len(options) + 1):
        least = brute(options[:count], units)
        assert isclose(table.cost(count), least, rel_tol=1e-9, abs_tol=1e-9)
        if least < inf:
            chosen = table.units(count)
            assert sum(chosen) <= units
            pairs = zip(options, chosen, strict=False)
            assert isclose(sum(o.costs[o.amounts.index(a)] for o, a in pairs), least, rel_tol=1e-9, abs_tol=1e-9)


def test_three_free_units_serve_one_of_the_amounts_one_two_four_eight() -> None:
    table = UnitTable([options_of((1, 2, 4, 8), DurationProfile(8.0))], 3)
    assert table.units(1) == [2], "exactly three is none of its amounts"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(sets(), max_size=4),
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1), st.integers(0, 1)),
)
def test_gpus_come_from_free_chunks_that_are_split_and_never_composed(
    options: list[UnitOptions], counts: tuple[int, ...]
) -> None:
    table = ChunkTable(options, FreeChunks(counts))
    for count in range(len(options) + 1):
        ways = itertools.product(*(zip(o.amounts, o.costs, strict=True) for o in options[:count]))
        fitting = (way for way in ways if FreeChunks(counts).take_all(a for a, _ in way) is not None)
        least = min((sum(c for _, c in way) for way in fitting), default=inf)
        assert isclose(table.cost(count), least, rel_tol=1e-9, abs_tol=1e-9)
        if least < inf:
            assert FreeChunks(counts).take_all(table.units(count)) is not None


def test_a_chunk_of_eight_serves_four_gpus_and_two_chunks_of_four_do_not_serve_eight() -> None:
    four = [options_of((4,), DurationProfile(1.0))]
    assert ChunkTable(four, FreeChunks((0, 0, 0, 1))).units(1) == [4]
    eight = [options_of((8,), DurationProfile(1.0))]
    assert ChunkTable(eight, FreeChunks((0, 0, 2, 0))).cost(1) == inf
