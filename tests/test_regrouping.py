"""Which engines are merged for the tail: foreseen ends, the search against all merges there are, and the rule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import trajectory_spec

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.events import PredictionMade
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.core.state import State
from heddle_dask.core.transitions import TrajectoryEvent
from heddle_dask.core.view import ClusterView, Merge
from heddle_dask.cost.engine_cost import EngineCost, engine_cost_for
from heddle_dask.strategies.regrouping.foreseen import TailEngine, TailTrajectory, end_s, left_after
from heddle_dask.strategies.regrouping.merge_idle import MergeIdle
from heddle_dask.strategies.regrouping.merging import (
    Foreseen,
    MergedKind,
    best_regroup,
    best_share,
    regrouped_s,
    staying_s,
)

COSTS = {degree: engine_cost_for("qwen3-14b", "h100", degree) for degree in (1, 2, 4, 8)}
Residents = dict[EngineId, list[TailTrajectory]]


def engine(name: str, degree: int = 1, node: str = "n") -> TailEngine:
    return TailEngine(EngineId(name), node, degree, COSTS[degree], 100 * degree)


def kinds_of(restart_s: float, degrees: Sequence[int] = (2, 4, 8)) -> dict[int, MergedKind]:
    return {degree: MergedKind(engine("", degree, ""), restart_s) for degree in degrees}


def row(name: str, tokens: float, context: float = 1000.0, tool_s: float = 0.0) -> TailTrajectory:
    return TailTrajectory(TrajectoryId(name), tokens, context, tool_s)


# -- foreseen ends -----------------------------------------------------------------------------------------------


def played_s(cost: EngineCost, rows: Sequence[TailTrajectory]) -> float:
    """Token by token."""
    left = {r.trajectory_id: (int(r.tokens), int(r.context_tokens)) for r in rows}
    seconds = 0.0
    while left:
        seconds += cost.iteration_s(len(left), sum(context for _, context in left.values()))
        left = {n: (tokens - 1, context + 1) for n, (tokens, context) in left.items() if tokens > 1}
    return seconds


sizes = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3000)), min_size=1, max_size=6)


@settings(deadline=None)
@given(sizes, st.sampled_from((1, 4)))
def test_the_end_is_that_of_playing_every_token(drawn: list[tuple[int, int]], degree: int) -> None:
    rows = [row(f"t{i}", tokens, context) for i, (tokens, context) in enumerate(drawn)]
    assert end_s(engine("e", degree), rows) == pytest.approx(played_s(COSTS[degree], rows), rel=1e-3)


@settings(deadline=None)
@given(sizes, st.floats(0.0, 8.0))
def test_what_is_left_after_a_while_ends_when_all_would_have(
    drawn: list[tuple[int, int]], seconds: float
) -> None:
    rows = [row(f"t{i}", tokens, context) for i, (tokens, context) in enumerate(drawn)]
    whole_s = end_s(engine("e"), rows)
    left = left_after(engine("e"), rows, seconds)
    if left:
        assert seconds + end_s(engine("e"), left) == pytest.approx(whole_s, rel=5e-3, abs=1e-3)
    else:
        assert whole_s <= seconds * 1.005 + 1e-3


def test_more_than_the_slots_and_more_than_the_memory_take_turns() -> None:
    rows = [row(f"t{i}", 100) for i in range(8)]
    narrow = replace(engine("e"), slots=4)
    small = replace(engine("e"), cost=replace(COSTS[1], capacity_tokens=4200))
    for tight in (narrow, small):
        assert 1.7 < end_s(tight, rows) / end_s(engine("e"), rows) < 2.1


# -- the search --------------------------------------------------------------------------------------------------


def all_regroups(
    engines: Sequence[TailEngine], residents: Mapping[EngineId, Any], degree: int, *, evacuate: bool
) -> Iterator[tuple[Merge, ...]]:
    """Every set of disjoint merges to that degree, one engine left."""

    def grow(chosen: tuple[Merge, ...], free: list[TailEngine]) -> Iterator[tuple[Merge, ...]]:
        if chosen:
            yield chosen
        for size in range(2, len(free) + 1):
            for some in combinations(free, size):
                nodes = {e.node for e in some}
                if sum(e.degree for e in some) == degree and len(nodes) == 1:
                    rest = [e for e in free if e not in some]
                    yield from grow((*chosen, Merge(tuple(e.engine_id for e in some), degree)), rest)

    movable = [e for e in engines if (evacuate or not residents[e.engine_id]) and e.degree < degree]
    for merges in grow((), movable):
        if sum(len(merge.engine_ids) for merge in merges) < len(engines):
            yield merges


def best_of_all(
    engines: Sequence[TailEngine], residents: Residents, kinds: Mapping[int, MergedKind], *, evacuate: bool
) -> float:
    """The earliest end with some merges; infinite where there are none."""
    return min(
        (
            regrouped_s(engines, residents, merges, kinds)
            for degree in kinds
            for merges in all_regroups(engines, residents, degree, evacuate=evacuate)
        ),
        default=float("inf"),
    )


@st.composite
def tails(draw: Any, degrees: Sequence[int] = (1,)) -> tuple[list[TailEngine], Residents]:
    count = draw(st.integers(2, 5))
    engines = [
        engine(f"e{i}", draw(st.sampled_from(degrees)), draw(st.sampled_from(("n", "n", "m"))))
        for i in range(count)
    ]
    residents: Residents = {e.engine_id: [] for e in engines}
    for i in range(draw(st.integers(1, 6))):
        home = draw(st.sampled_from(engines)).engine_id
        tokens, context = draw(st.integers(1, 20_000)), draw(st.integers(100, 20_000))
        residents[home].append(row(f"t{i}", tokens, context, draw(st.sampled_from((0.0, 5.0)))))
    return engines, residents


@settings(deadline=None, max_examples=150)
@given(tails(), st.sampled_from((0.0, 5.0, 20.0, 60.0)))
def test_among_like_idle_engines_the_choice_is_that_of_brute_force(
    tail: tuple[list[TailEngine], Residents], restart_s: float
) -> None:
    engines, residents = tail
    kinds = kinds_of(restart_s)
    found = best_regroup(engines, residents, kinds, evacuate=False)
    best_s = best_of_all(engines, residents, kinds, evacuate=False)
    stay_s = staying_s(engines, residents)
    if found is None:
        assert best_s == float("inf") or restart_s >= stay_s
    else:
        assert found.regroup_s <= best_s * (1 + 1e-9)
        assert found.stay_s == stay_s


@settings(deadline=None, max_examples=150)
@given(tails((1, 1, 2)), st.sampled_from((0.0, 5.0, 20.0, 60.0)))
def test_with_evacuation_and_unlike_engines_brute_force_is_seldom_better_and_never_much(
    tail: tuple[list[TailEngine], Residents], restart_s: float
) -> None:
    engines, residents = tail
    kinds = kinds_of(restart_s)
    found = best_regroup(engines, residents, kinds, evacuate=True)
    best_s = best_of_all(engines, residents, kinds, evacuate=True)
    stay_s = staying_s(engines, residents)
    mine_s = stay_s if found is None else min(stay_s, found.regroup_s)
    # Of 1,500 random tails 88 % were equal, the mean was 1.005 and the worst 1.16.
    assert mine_s <= 1.25 * min(best_s, stay_s)


@settings(deadline=None)
@given(tails(), st.floats(0.0, 100.0))
def test_a_merge_is_never_foreseen_to_end_before_the_restart_or_the_fastest_engine_allows(
    tail: tuple[list[TailEngine], Residents], restart_s: float
) -> None:
    engines, residents = tail
    found = best_regroup(engines, residents, kinds_of(restart_s), evacuate=True)
    if found is None:
        return
    fastest = min(COSTS.values(), key=lambda cost: cost.iteration_s(1, 0))
    longest = max(r.tokens for rows in residents.values() for r in rows)
    assert found.regroup_s >= 0.99 * longest * fastest.iteration_s(1, 0)
    assert all(len({e.node for e in engines if e.engine_id in m.engine_ids}) == 1 for m in found.merges)
    assert sum(len(m.engine_ids) for m in found.merges) < len(engines)


def test_the_longest_go_to_the_merged_engine_as_many_as_balance_it() -> None:
    old = [engine("a"), engine("b")]
    left = {EngineId("a"): [row("1", 9000), row("2", 8000)], EngineId("b"): [row("3", 500), row("4", 400)]}
    seconds, going = best_share(old, left, [engine("m", 4)])
    assert [r.trajectory_id for r in going][:2] == ["1", "2"]
    choices = []
    ordered = sorted((r for rows in left.values() for r in rows), key=lambda r: -r.tokens)
    for count in range(5):
        gone = ordered[:count]
        merged_s = end_s(engine("m", 4), gone, [r.context_tokens for r in gone])
        rest = [[r for r in rows if r not in gone] for rows in left.values()]
        choices.append(max(merged_s, *(end_s(e, rows) for e, rows in zip(old, rest, strict=True))))
    assert seconds == pytest.approx(min(choices))


# -- the rule ----------------------------------------------------------------------------------------------------


@dataclass
class Resident:
    """A trajectory that rests at an engine, of which that is predicted."""

    home: int
    median: float
    q90: float
    context: int = 1000


def cluster(degrees: Sequence[int], residents: Sequence[Resident], nodes: Sequence[str] = ()) -> ClusterView:
    state = State()
    state.observed_per_token = 0.0
    for number, degree in enumerate(degrees):
        spec = EngineDescription(
            EngineId(f"e{number}"),
            100 * degree,
            40_960,
            tp_degree=degree,
            kv_capacity_tokens=COSTS[degree].capacity_tokens,
            node=nodes[number] if nodes else "n",
        )
        state.engines[spec.engine_id] = Engine(spec, state.next_number())
    state.refresh_ready()
    for number, resident in enumerate(residents):
        t = Trajectory(trajectory_spec(f"t{number}"), state.next_number())
        state.trajectories[t.trajectory_id] = t
        t.advance(TrajectoryEvent.ADMITTED, 0.0)
        state.alive += 1
        state.set_home(t, EngineId(f"e{resident.home}"))
        state.set_context(t, resident.context)
        made = PredictionMade(0.0, t.trajectory_id, 0, resident.median, resident.q90, 0.0, 0.0)
        state.take_prediction(t, made)
    return ClusterView(state)


def rule(**options: Any) -> MergeIdle:
    made = MergeIdle(**options)
    made.use_costs(COSTS)
    return made


def test_three_idle_engines_beside_a_long_one_become_a_faster_one() -> None:
    view = cluster([1] * 8, [Resident(0, 20_000, 20_000)])
    regroup = rule(restart_s=20.0).propose(view, 100.0)
    assert regroup is not None
    (merge,) = regroup.merges
    assert merge.tp_degree == 4 and "e0" not in merge.engine_ids
    assert regroup.regroup_s < 0.9 * regroup.stay_s
    assert rule(restart_s=1000.0).propose(view, 100.0) is None, "the price is not right"


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (cluster([8, 8], [Resident(0, 20_000, 20_000)]), "no larger degree"),
        (cluster([1] * 4, [Resident(0, 20_000, 20_000)], ["a", "b", "c", "d"]), "one engine a node"),
        (cluster([1] * 4, [Resident(0, 20_000, 20_000)], [""] * 4), "unknown nodes"),
        (cluster([1], [Resident(0, 20_000, 20_000)]), "one engine"),
        (cluster([1] * 8, [Resident(0, 100, 100)]), "nearly done"),
        (cluster([1] * 8, [Resident(0, 100, 20_000)]), "the median says nearly done"),
        (cluster([1] * 8, []), "nobody lives"),
    ],
)
def test_nothing_is_merged_where_it_cannot_pay(view: ClusterView, why: str) -> None:
    assert rule(restart_s=20.0).propose(view, 100.0) is None, why


def test_nothing_is_merged_without_predictions_or_while_somebody_lives_nowhere() -> None:
    view = cluster([1] * 8, [Resident(0, 20_000, 20_000)])
    t = view.trajectory(TrajectoryId("t0"))
    t.predicted_tokens_q90 = None
    assert rule(restart_s=20.0).propose(view, 100.0) is None
    t.predicted_tokens_q90 = 20_000
    view._state.set_home(t, None)
    assert rule(restart_s=20.0).propose(view, 100.0) is None


def test_it_is_asked_again_only_when_an_eighth_has_ended_and_gives_up_after_so_many() -> None:
    made = rule(restart_s=1000.0)
    engines = cluster([1] * 8, []).ready_engines
    due = [alive for alive in range(30, 0, -1) if made._is_due(alive, engines)]
    assert due == [30, 27, 24, 21, 19, 17, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert not made._is_due(1, engines) and made._is_due(9, engines), "another batch"
    view = cluster([1] * 8, [Resident(0, 20_000, 20_000)])
    assert rule(restart_s=20.0, most=0).propose(view, 100.0) is None


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(1, 30_000), st.floats(1, 4)), min_size=1, max_size=10),
    st.sampled_from((0.0, 20.0, 60.0)),
    st.booleans(),
)
def test_what_is_proposed_ends_clearly_earlier_under_both_quantiles(
    drawn: list[tuple[int, float, float]], restart_s: float, evacuate: bool
) -> None:
    residents = [Resident(home, median, median * factor) for home, median, factor in drawn]
    view = cluster([1] * 6, residents)
    regroup = rule(restart_s=restart_s, evacuate=evacuate).propose(view, 0.0)
    if regroup is None:
        return
    kinds = kinds_of(restart_s)
    engines = [engine(f"e{i}") for i in range(6)]
    for quantile in ("median", "q90"):
        tail: Residents = {e.engine_id: [] for e in engines}
        for i, resident in enumerate(residents):
            tail[EngineId(f"e{resident.home}")].append(row(f"t{i}", getattr(resident, quantile)))
        foreseen = Foreseen(
            regroup.merges, staying_s(engines, tail), regrouped_s(engines, tail, regroup.merges, kinds)
        )
        assert foreseen.gain_s >= max(1.0, 0.1 * foreseen.stay_s) - 1e-9
    if not evacuate:
        idle = {f"e{i}" for i in range(6)} - {f"e{r.home}" for r in residents}
        assert {name for merge in regroup.merges for name in merge.engine_ids} <= idle
