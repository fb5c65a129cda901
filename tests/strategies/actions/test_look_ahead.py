"""The estimate of what waits, and the eviction that it decides, against straightforward ones."""

from __future__ import annotations

from itertools import pairwise
from math import inf, isclose

from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.nouns import DurationProfile
from heddle_dask.strategies.actions.unit_table import (
    Ahead,
    UnitOptions,
    UnitTable,
    Waiting,
    candidates_kept,
    waiting_cost,
)

RELEASES = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.5, 7.0]), st.integers(1, 3)), max_size=4)


def waiting_of(profile: DurationProfile, amounts: tuple[int, ...]) -> Waiting:
    return Waiting(tuple((amount, profile.seconds(amount)) for amount in amounts))


WAITING = st.builds(
    waiting_of,
    st.builds(DurationProfile, st.floats(0.5, 20), st.sampled_from([0.0, 0.3])),
    st.sampled_from([(1,), (2,), (1, 2), (1, 2, 4)]),
)


def plainly(releases: list[tuple[float, int]], waiting: list[Waiting], rungs: list[int]) -> float:
    """Second by second over the moments at which units become free, with a list of moments in place of a heap."""
    total, moments, cost, now = sum(u for _, u in releases), list(releases), 0.0, 0.0
    for action, rung in zip(waiting, rungs, strict=True):
        units, seconds = action.ladder[min(rung, len(action.ladder) - 1)]
        if units > total:
            units, seconds = action.ladder[0]
        if units > total:
            continue
        starts = sorted({now, *(at for at, _ in moments if at > now)})
        now = next(at for at in starts if sum(u for when, u in moments if when <= at) >= units)
        left = units
        for moment in sorted(moments):
            taken = min(left, moment[1])
            if taken and moment[0] <= now:
                moments.remove(moment)
                moments += [(moment[0], moment[1] - taken)] if moment[1] > taken else []
                left -= taken
        moments.append((now + seconds, units))
        cost += now + seconds
    return cost


@settings(max_examples=150, deadline=None)
@given(RELEASES, st.lists(WAITING, max_size=4), st.integers(1, 3), st.sampled_from(["first", "all"]))
def test_the_estimate_waits_until_enough_units_are_free(
    releases: list[tuple[float, int]], waiting: list[Waiting], depth: int, ahead: Ahead
) -> None:
    tried = []
    for rung in range(depth):
        rungs = [rung if ahead == "all" or number == 0 else 0 for number in range(len(waiting))]
        tried.append(plainly(releases, waiting, rungs))
    assert isclose(waiting_cost(releases, waiting, depth, ahead), min(tried), abs_tol=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.builds(DurationProfile, st.floats(0.5, 30), st.just(0.05)), min_size=1, max_size=4),
    RELEASES,
    st.lists(WAITING, max_size=3),
    st.integers(0, 4),
    st.integers(0, 1),
)
def test_candidates_are_evicted_from_the_tail_as_long_as_the_sum_falls(
    profiles: list[DurationProfile],
    running: list[tuple[float, int]],
    behind: list[Waiting],
    spare: int,
    least_kept: int,
) -> None:
    amounts = tuple(range(1, 5))
    units = len(profiles) + spare
    options = [UnitOptions(amounts, tuple(p.seconds(a) for a in amounts)) for p in profiles]
    waiting = [waiting_of(p, (1, 2, 4)) for p in profiles]
    table = UnitTable(options, units)

    def objective(count: int) -> float:
        chosen = table.units(count)
        ends = [(p.seconds(a), a) for p, a in zip(profiles, chosen, strict=False)]
        idle = (0.0, units - sum(chosen))
        return sum(s for s, _ in ends) + waiting_cost(
            [*running, *ends, idle], [*waiting[count:], *behind], 2, evicted=len(profiles) - count
        )

    kept = candidates_kept(
        table,
        waiting,
        behind,
        running,
        units,
        seconds=[[(a, p.seconds(a)) for a in amounts] for p in profiles],
        most=[4] * len(profiles),
        depth=2,
        ahead="first",
        least_kept=least_kept,
    )
    assert least_kept <= kept <= len(profiles)
    if table.units(len(profiles)) == [4] * len(profiles):
        assert kept == len(profiles), "nobody gains"
        return
    sums = [objective(count) for count in range(kept, len(profiles) + 1)]
    assert all(a < b for a, b in pairwise(sums)), "each eviction shortened the sum"
    assert kept == least_kept or objective(kept - 1) >= sums[0], "one more would not have"


def test_what_would_start_at_once_is_not_evicted() -> None:
    """One that starts beside an action of 600 s waits for nothing, whatever its estimate says."""
    (waiting,) = [waiting_of(DurationProfile(8.0, 0.9), (1,))]
    assert waiting_cost([(0.0, 1), (600.0, 2)], [waiting], 2) == 8.0
    assert waiting_cost([(0.0, 1), (600.0, 2)], [waiting], 2, evicted=1) == inf
    assert waiting_cost([(2.0, 1), (600.0, 2)], [waiting], 2, evicted=1) == 10.0, "an eviction that is carried out"
