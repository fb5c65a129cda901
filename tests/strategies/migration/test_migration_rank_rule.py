"""The paper's rank rule: scaled ranges, and ranks that follow the predictions."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.ids import TrajectoryId
from heddle_dask.strategies.migration.rank_order import RankOrder, rank_target

sizes_of = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 0)


@given(sizes_of)
def test_with_all_active_every_engine_gets_its_own_back(sizes: list[int]) -> None:
    count = sum(sizes)
    targets = [rank_target(rank, count, sizes) for rank in range(count)]
    assert [targets.count(number) for number in range(len(sizes))] == sizes
    assert targets == sorted(targets)


@given(sizes_of, st.integers(1, 60))
def test_shares_shrink_with_the_active(sizes: list[int], active: int) -> None:
    targets = [rank_target(rank, active, sizes) for rank in range(active)]
    assert targets == sorted(targets)
    for number, size in enumerate(sizes):
        share = Fraction(size * active, sum(sizes))
        assert abs(targets.count(number) - share) <= 1
        assert size > 0 or targets.count(number) == 0


def test_half_of_them_active() -> None:
    assert [rank_target(rank, 5, [1, 3, 6]) for rank in range(5)] == [1, 1, 2, 2, 2]


changes = st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(0, 4)), max_size=40)


@given(changes)
def test_ranks_are_those_of_sorting_anew(rows: list[tuple[str, int | None]]) -> None:
    order, lengths = RankOrder(), {}
    for name, length in rows:
        if length is None:
            order.remove(TrajectoryId(name))
            lengths.pop(name, None)
        else:
            rank = order.update(TrajectoryId(name), length)
            lengths[name] = length
            assert rank == sorted(lengths, key=lambda n: (-lengths[n], n)).index(name)
        assert len(order) == len(lengths)
