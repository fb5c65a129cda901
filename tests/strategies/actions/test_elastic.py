"""Elastic units, as lists of events and commands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.core_builders import Stage, action_of

from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, RunAction
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.nouns import DurationProfile, HostDescription
from heddle_dask.core.resources import IDLE_NICE, Amounts, ApiQuota, ResourceDemand, Resources, api_resource, cpu_weight
from heddle_dask.strategies.actions.elastic import ElasticUnits
from heddle_dask.strategies.presets import PRESETS, Strategy, build_strategies

SCALES = DurationProfile(8.0, 0.02)


def stage_of(options: str = "", cpus: int = 8, trajectories: str = "abcdef") -> Stage:
    stage = Stage(overrides=[f"actions=elastic{options}"])
    stage.add_host("H1", cpus)
    stage.submit(*trajectories)
    return stage


def ask(
    stage: Stage,
    name: str,
    *,
    profile: DurationProfile | None = SCALES,
    pool: str = "cpu",
    label: str = "tests",
    **demand: Amounts | int,
) -> list[Command]:
    wanted = ResourceDemand.of(**(demand or {"cpus": Amounts(1, 8)}))
    action = replace(action_of(name, name[0], pool=pool), demand=wanted, profile=profile, label=label)
    return stage.feed(ev.ActionRequested, action)


def units(commands: list[Command], resource: str = "cpus") -> dict[str, int]:
    return {c.action_id: c.resources[resource] for c in commands if isinstance(c, RunAction)}


def end(stage: Stage, name: str, run_s: float = 1.0, host: str = "H1") -> list[Command]:
    return stage.feed(ev.ActionFinished, ActionId(name), HostId(host), run_s)


def reach(commands: list[Command]) -> dict[str, tuple[int, int]]:
    """The CPUs that each started action has alone, and those that it may use."""
    return {c.action_id: (c.cpus, c.reach_cpus) for c in commands if isinstance(c, RunAction)}


@pytest.mark.parametrize("cpus", [2, 4, 8, 16])
def test_an_elastic_action_alone_has_the_whole_worker(cpus: int) -> None:
    for profile in (None, SCALES):
        assert reach(ask(stage_of(cpus=cpus), "a1", profile=profile)) == {"a1": (1, min(cpus, 8))}


def test_the_shorter_a_suite_declares_to_be_the_more_of_the_idle_cpus_it_gets() -> None:
    seconds = {"a": 1.0, "b": 8.0, "c": 20.0, "d": 100.0, "e": 1e9}
    stage, found = stage_of(), {}
    for name, one_unit_s in seconds.items():
        (run,) = ask(stage, f"{name}1", profile=DurationProfile(one_unit_s))
        found[name] = run.nice
    (run,) = ask(stage, "f1", profile=None)
    assert found == {"a": 7, "b": 7, "c": 11, "d": 18, "e": IDLE_NICE} and run.nice == 19
    assert [run.nice for run in ask(stage, "a2", cpus=1)] == [0], "its CPU is its own"
    weights = [cpu_weight(found[name]) * seconds[name] for name in "bcd"]
    assert max(weights) < 1.2 * min(weights), "in inverse proportion"


def test_nothing_waits_beside_idle_cpus() -> None:
    """A command of one CPU runs for long: a suite starts at once, and so does what comes while the suite runs."""
    stage = stage_of(cpus=2)
    assert reach(ask(stage, "a1", cpus=1)) == {"a1": (1, 0)}
    assert reach(ask(stage, "b1")) == {"b1": (1, 2)}
    assert ask(stage, "c1", cpus=1) == [], "both CPUs are granted"
    assert reach(end(stage, "a1")) == {"c1": (1, 0)}


def test_as_many_share_a_worker_as_it_has_least_amounts_for() -> None:
    stage = stage_of(cpus=4)
    started = [reach(ask(stage, f"{name}1", cpus=Amounts(2, 8))) for name in "abc"]
    assert started == [{"a1": (2, 4)}, {"b1": (2, 4)}, {}]


def test_a_set_of_amounts_reaches_its_largest() -> None:
    assert reach(ask(stage_of(cpus=8), "a1", cpus=Amounts(2, 4, (2, 4)))) == {"a1": (2, 4)}


def test_calls_of_an_api_are_shared_within_its_quota_and_without_one_as_many_as_are_useful() -> None:
    stage = stage_of()
    stage.feed(ev.PoolsDeclared, (ApiQuota("small", 4), ApiQuota("free")))
    wide, perfect = Amounts(1, 2**62), DurationProfile(8.0)
    ask(stage, "a1", profile=perfect, **{api_resource("small"): wide})
    assert units(stage.feed(ev.TimeReached), api_resource("small")) == {"a1": 4}
    ask(stage, "b1", profile=perfect, **{api_resource("free"): Amounts(1, 1000)})
    assert units(stage.feed(ev.TimeReached), api_resource("free")) == {"b1": 1000}


def test_one_signature_does_not_block_another() -> None:
    stage = stage_of()
    stage.feed(ev.HostJoined, HostDescription(HostId("H2"), Resources.of(cpus=8, memory_bytes=4)))
    assert units(ask(stage, "a1", cpus=8, memory_bytes=4)) == {"a1": 8}
    assert units(ask(stage, "b1", cpus=8, memory_bytes=4)) == {}, "the only host with memory is busy"
    assert units(ask(stage, "c1", cpus=1)) == {"c1": 1}, "on H1, past b1"


def test_the_longest_trajectory_goes_first_until_another_is_overdue() -> None:
    stage = stage_of(",order=tail,max_wait_s=30", cpus=1)
    for name, tokens in (("a", 10.0), ("b", 1000.0), ("c", 500.0)):
        stage.predict(name, tokens)
    ask(stage, "d1", cpus=1)
    for name in ("a1", "b1", "c1"):
        ask(stage, name, cpus=1)
    assert units(end(stage, "d1")) == {"b1": 1}
    stage.at += 30
    assert units(end(stage, "b1")) == {"a1": 1}, "the oldest of the overdue"


def test_without_predictions_the_first_goes_first() -> None:
    stage = stage_of(",order=tail", cpus=1)
    for name in ("a1", "b1", "c1"):
        ask(stage, name, cpus=1)
    assert units(end(stage, "a1")) == {"b1": 1}


def test_room_is_kept_for_a_wide_action_that_has_waited_too_long() -> None:
    stage = stage_of(",max_wait_s=10", cpus=4)
    stage.feed(ev.HostJoined, HostDescription(HostId("H2"), Resources.of(cpus=1)))
    for name in ("a1", "b1", "c1", "d1"):
        ask(stage, name, cpus=1)
    assert ask(stage, "e1", cpus=4, memory_bytes=0) == []
    stage.at += 10
    running, started = ["a1", "b1", "c1", "d1"], 0
    for number in range(8):  # single CPUs come without end, under another signature
        ask(stage, f"f{number}", profile=None, cpus=Amounts(1, 2), label="small")
        done = running.pop(0)
        host = stage.state.actions[ActionId(done)].host
        commands = end(stage, done, host=host or "")
        commands += stage.feed(ev.TimeReached)
        running += [name for name in units(commands) if name != "e1"]
        if "e1" in units(commands):
            break
        started += 1
    assert "e1" in units(commands), "it never starts"
    assert started <= 6


def test_an_action_that_no_present_host_can_run_holds_back_nothing() -> None:
    stage = stage_of(cpus=8)
    stage.add_host("H2", 2)
    assert units(ask(stage, "a1", cpus=8)) == {"a1": 8}
    stage.feed(ev.HostLost, HostId("H1"))
    assert units(ask(stage, "b1", cpus=1)) == {"b1": 1}


def test_gpus_come_from_chunks_of_the_whole_pool() -> None:
    stage = stage_of(",depth=0")
    for name in ("G1", "G2"):
        stage.feed(ev.HostJoined, HostDescription(HostId(name), Resources.of(gpus=4), "gpu"))
    sizes = Amounts(1, 8, (1, 2, 4, 8))
    for name in ("a1", "b1", "c1"):
        ask(stage, name, profile=DurationProfile(8.0), pool="gpu", gpus=sizes)
    commands = stage.feed(ev.TimeReached)
    assert sorted(units(commands, "gpus").values()) == [2, 2, 4]
    by_host: dict[str, int] = {}
    for command in commands:
        assert isinstance(command, RunAction)
        by_host[command.host_id] = by_host.get(command.host_id, 0) + command.resources["gpus"]
    assert by_host == {"G1": 4, "G2": 4}


def test_failures_and_rate_limits_are_no_durations() -> None:
    stage = stage_of()
    ask(stage, "a1", cpus=1)
    stage.feed(ev.ActionFinished, ActionId("a1"), HostId("H1"), 900.0, False, True, "timeout")
    durations = stage.controller.strategies.actions._durations  # type: ignore[attr-defined]
    assert (durations.kinds["tests"].failed, durations.kinds["tests"].observed) == (1, 0)


@pytest.mark.parametrize(
    "options",
    ["order=x", "depth=-1", "ahead=x", "max_wait_s=x", "profile=x"],
)
def test_bad_options_are_refused_in_one_line(options: str) -> None:
    with pytest.raises(BadInput) as refusal:
        Strategy("heddle", [f"actions=elastic,{options}"])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_lends_idle_cpus_in_order_of_arrival(preset: str) -> None:
    actions = build_strategies(preset).actions
    assert isinstance(actions, ElasticUnits) and actions.order == "fcfs"
