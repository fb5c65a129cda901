"""What each strategy promises, through the controller where that is how it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage, engine_of, step_of, trajectory_spec

from heddle_dask.core import events as ev
from heddle_dask.core.commands import AdmitTrajectory, Command, MoveContext
from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.ids import EngineId
from heddle_dask.core.state import State
from heddle_dask.core.view import ClusterView
from heddle_dask.strategies.admission.at_most import AtMost
from heddle_dask.strategies.placement.cache_aware import CacheAware
from heddle_dask.strategies.placement.least_load import LeastLoad, inflight_load, resident_load
from heddle_dask.strategies.placement.round_robin import RoundRobin
from heddle_dask.strategies.placement.sticky import Sticky, StickyByCount, StickyLeastLoaded, hash_weight
from heddle_dask.strategies.scheduling import FirstComeFirstServed

Drawing = LeastLoad | StickyByCount | StickyLeastLoaded


def engines(*names: str, slots: int = 4) -> list[Engine]:
    return [Engine(engine_of(name, slots), number) for number, name in enumerate(names, start=1)]


def trajectory(name: str, home: str | None = None) -> Trajectory:
    made = Trajectory(trajectory_spec(name), 1)
    made.home = EngineId(home) if home is not None else None
    return made


def choose(strategy: RoundRobin | Drawing | Sticky, t: str, among: list[Engine]) -> str:
    return strategy.choose_engine(trajectory(t), step_of(t), among).engine_id


# -- round robin -----------------------------------------------------------------------------------------


def test_round_robin_takes_turns() -> None:
    strategy, all_three = RoundRobin(), engines("E1", "E2", "E3")
    assert [choose(strategy, "a", all_three) for _ in range(7)] == ["E1", "E2", "E3", "E1", "E2", "E3", "E1"]


def test_round_robin_goes_on_when_engines_come_and_go() -> None:
    strategy, (one, two, three) = RoundRobin(), engines("E1", "E2", "E3")
    assert [choose(strategy, "a", [one, two]) for _ in range(3)] == ["E1", "E2", "E1"]
    assert [choose(strategy, "a", [one, two, three]) for _ in range(4)] == ["E3", "E2", "E1", "E3"], (
        "the new one gets one turn, not all the turns that it missed"
    )
    assert [choose(strategy, "a", [one, three]) for _ in range(3)] == ["E1", "E3", "E1"]
    assert choose(strategy, "a", [one, two, three]) == "E2"


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, 4), min_size=1), max_size=40))
def test_round_robin_never_repeats_an_engine_while_another_candidate_waited_longer(
    offers: list[set[int]],
) -> None:
    strategy, five = RoundRobin(), engines("E0", "E1", "E2", "E3", "E4")
    last: dict[str, int] = {}
    for turn, offer in enumerate(offers, start=1):
        candidates = [five[i] for i in sorted(offer)]
        choice = choose(strategy, "a", candidates)
        assert last.get(choice, 0) == min(last.get(c.engine_id, 0) for c in candidates)
        last[choice] = turn


def test_round_robin_through_the_controller_after_a_join() -> None:
    stage = Stage("sticky", overrides=["placement=round-robin"])
    stage.join("E1", "E2")
    stage.submit(*"abcdef")
    assert [stage.placed(n).engine_id for n in "abc"] == ["E1", "E2", "E1"]
    stage.join("E3")
    assert [stage.placed(n).engine_id for n in "def"] == ["E3", "E2", "E1"]


# -- least load ------------------------------------------------------------------------------------------


def test_least_load_counts_tokens_per_slot_and_not_steps() -> None:
    stage = Stage("least-load")
    stage.join("E1", "E2")
    stage.submit(*"abcd")
    long = stage.placed("a", context=1000).engine_id
    others = [stage.placed(n, context=100).engine_id for n in "bcd"]
    assert others == [EngineId("E2") if long == "E1" else EngineId("E1")] * 3


def test_least_load_weighs_by_slots() -> None:
    small, large = Engine(engine_of("E1", slots=1), 1), Engine(engine_of("E2", slots=8), 2)
    small.inflight_tokens, large.inflight_tokens = 100, 400
    assert choose(LeastLoad(), "a", [small, large]) == "E2"
    assert inflight_load(small) == (100.0, 0.0)
    assert inflight_load(large) == (50.0, 0.0)


def test_least_load_forgets_the_home() -> None:
    home, other = engines("E1", "E2")
    home.inflight_tokens = 1
    assert LeastLoad().choose_engine(trajectory("a", home="E1"), step_of("a"), [home, other]) is other


def test_least_load_counts_steps_when_no_tokens_are_known() -> None:
    one, two = engines("E1", "E2")
    one.inflight[trajectory_spec("a").trajectory_id] = None
    assert {choose(LeastLoad(seed), "b", [one, two]) for seed in range(20)} == {"E2"}


@pytest.mark.parametrize("preset", ["least-load", "sticky-least-loaded"])
def test_random_ties_spread_a_burst(preset: str) -> None:
    """At the first steps all engines are equal: none may get the whole burst."""
    stage = Stage(preset)
    names = [f"t{number}" for number in range(40)]
    stage.submit(*names)
    for name in names:
        stage.request(name, context=50)
    stage.join("E0")
    for name in names:
        stage.end(name)
    stage.join(*(f"E{number}" for number in range(1, 5)))
    later = [f"u{number}" for number in range(40)]
    stage.submit(*later)
    counts = Counter(stage.placed(name, context=50).engine_id for name in later)
    assert sorted(counts.values()) == [8] * 5


@pytest.mark.parametrize("kind", [LeastLoad, StickyByCount, StickyLeastLoaded])
def test_ties_are_drawn_and_not_always_the_first(kind: Callable[[int], Drawing]) -> None:
    four = engines("E1", "E2", "E3", "E4")
    drawn = Counter(choose(kind(seed), "a", four) for seed in range(200))
    assert set(drawn) == {"E1", "E2", "E3", "E4"}
    assert min(drawn.values()) > 20, "about 50 each"
    one = kind(7)
    assert len({choose(one, "a", four) for _ in range(50)}) == 4


@pytest.mark.parametrize("kind", [LeastLoad, StickyByCount, StickyLeastLoaded])
def test_the_same_seed_draws_the_same(kind: Callable[[int], Drawing]) -> None:
    four = engines("E1", "E2", "E3", "E4")
    one, two, other = kind(3), kind(3), kind(4)
    first = [choose(one, "a", four) for _ in range(50)]
    assert first == [choose(two, "a", four) for _ in range(50)]
    assert first != [choose(other, "a", four) for _ in range(50)]


# -- sticky ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["sticky", "verl", "sticky-least-loaded"])
def test_sticky_stays_when_engines_join(preset: str) -> None:
    stage = Stage(preset)
    stage.join("E1")
    stage.submit("a")
    stage.finish(stage.placed("a"))
    stage.join("E2", "E3", "E4")
    for index in range(1, 6):
        step = stage.placed("a", index)
        assert step.engine_id == "E1"
        stage.finish(step)


def test_hash_weight_is_fixed_for_all_times() -> None:
    """A journal of last year is replayed with the same placement."""
    assert hash_weight("t0", "E1") == 7974974226163637742
    assert hash_weight("t0", "E2") != hash_weight("t0", "E1") != hash_weight("t1", "E1")
    assert hash_weight("ab", "c") != hash_weight("a", "bc")


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(0, 5), st.integers(0, 1000))
def test_rendezvous_hashing_moves_only_the_trajectories_of_the_lost_engine(count: int, lost: int, offset: int) -> None:
    all_engines = engines(*(f"E{number}" for number in range(count)))
    left = [engine for engine in all_engines if engine.engine_id != f"E{lost % count}"]
    for number in range(offset, offset + 20):
        before = choose(Sticky(), f"t{number}", all_engines)
        after = choose(Sticky(), f"t{number}", left)
        assert (before == after) == (before != f"E{lost % count}")


def test_rendezvous_hashing_does_not_depend_on_the_order_of_engines() -> None:
    three = engines("E1", "E2", "E3")
    for number in range(30):
        name = f"t{number}"
        assert choose(Sticky(), name, three) == choose(Sticky(), name, three[::-1])


def test_rendezvous_hashing_spreads() -> None:
    four = engines("E1", "E2", "E3", "E4")
    counts = Counter(choose(Sticky(), f"t{number}", four) for number in range(1000))
    assert set(counts) == {"E1", "E2", "E3", "E4"}
    assert 200 <= min(counts.values()) <= max(counts.values()) <= 300


def test_the_loss_of_an_engine_moves_only_its_trajectories_through_the_controller() -> None:
    stage = Stage("sticky", overrides=["stealing=none"])
    stage.join("E1", "E2", "E3")
    names = [f"t{number}" for number in range(30)]
    stage.submit(*names)
    before = {}
    for name in names:
        step = stage.placed(name)
        before[name] = step.engine_id
        stage.finish(step)
    stage.lose("E2")
    after = {name: stage.placed(name, 1).engine_id for name in names}
    assert {name for name in names if before[name] != after[name]} == {n for n in names if before[n] == "E2"}
    assert len({after[name] for name in names if before[name] == "E2"}) == 2, "spread over both others"


def test_sticky_least_loaded_counts_trajectories_inside_tools() -> None:
    stage = Stage("sticky-least-loaded")
    stage.join("E1", "E2")
    stage.submit("a", "b", "c")
    first = stage.placed("a", context=500)
    stage.finish(first)
    stage.act("a1", "a")
    assert stage.placed("b", context=100).engine_id != first.engine_id
    assert stage.placed("c", context=100).engine_id != first.engine_id
    assert resident_load(stage.engine(first.engine_id)) == (510 / 4, 1 / 4)


def test_sticky_least_loaded_leaves_a_draining_home() -> None:
    stage = Stage("sticky-least-loaded")
    stage.join("E1", "E2")
    stage.submit("a")
    first = stage.placed("a")
    stage.finish(first)
    (move,) = stage.feed(ev.EngineDraining, first.engine_id)
    assert isinstance(move, MoveContext)
    stage.moved(move, ok=False)
    second = stage.placed("a", 1)
    assert second.engine_id != first.engine_id
    stage.finish(second)
    assert stage.placed("a", 2).engine_id == second.engine_id


# -- order and admission ---------------------------------------------------------------------------------


def test_cache_aware_forgets_the_groups_that_were_not_used_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heddle_dask.strategies.placement.cache_aware._MOST_GROUPS", 3)
    strategy, among = CacheAware(), engines("a", "b")
    step = step_of("t")
    for name in ("x", "y", "z", "x", "w"):
        strategy.choose_engine(trajectory(name), step, among)
    assert list(strategy._seen) == ["group of z", "group of x", "group of w"]


def test_first_come_gives_every_step_its_own_priority() -> None:
    rule, view = FirstComeFirstServed(), ClusterView(State())
    priorities = [rule.priority(view, trajectory("a"), step_of("a"), order) for order in range(1, 50)]
    assert all(one > two for one, two in pairwise(priorities))


@pytest.mark.parametrize("limit", [0, -1, "many", 1.5])
@pytest.mark.parametrize("option", ["alive", "per_engine"])
def test_at_most_needs_a_positive_number(option: str, limit: object) -> None:
    with pytest.raises(ValueError, match=f"{option} is .*whole number from 1"):
        AtMost(**{option: limit})  # type: ignore[arg-type]


def admitted(commands: list[Command]) -> list[str]:
    return [c.trajectory_id for c in commands if isinstance(c, AdmitTrajectory)]


def test_at_most_per_engine_follows_the_engines() -> None:
    stage = Stage(overrides=["admission=at-most,per_engine=2"])
    assert admitted(stage.submit(*(f"t{number}" for number in range(12)))) == [], "there is no engine yet"
    assert admitted(stage.join("E1")) == ["t0", "t1"]
    assert admitted(stage.join("E2", "E3")) == ["t2", "t3", "t4", "t5"]
    stage.finish(stage.placed("t0"))
    assert stage.state.alive == 6, "its tool does not make room: the whole trajectory counts"
    assert admitted(stage.end("t0")) == ["t6"]
    assert admitted(stage.lose("E3")) == [], "nobody is stopped"
    assert [admitted(stage.end(f"t{number}")) for number in (1, 2, 3)] == [[], [], ["t7"]]
    assert admitted(stage.join("E4")) == ["t8", "t9"]


def test_slime_counts_requests_and_not_tokens() -> None:
    stage = Stage("slime")
    stage.join("E1", "E2")
    stage.submit(*"abcd")
    long = stage.placed("a", context=1000).engine_id
    assert [stage.placed(name, context=10).engine_id for name in "bcd"].count(long) == 1
