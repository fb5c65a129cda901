"""What peers do with actions: fixed units, a sandbox per trajectory, workers per kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.core_builders import Stage

from benchmarks.actions.cpu_hosts import Pool
from benchmarks.actions.cpu_job import run_cpu_job
from benchmarks.opponents import FIXED, PER_TRAJECTORY, WORKER_POOLS
from benchmarks.opponents.weighted_hosts import HostWeights, filled
from heddle_dask.core import events as ev
from heddle_dask.core.commands import Command, RunAction
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.strategies.presets import Strategy


def stage_of(actions: str, cpus: int = 8) -> Stage:
    stage = Stage(overrides=[f"actions={actions}"])
    stage.add_host("H1", cpus)
    stage.submit("a", "b", "c")
    return stage


def started(commands: list[Command]) -> dict[str, int]:
    return {c.action_id: c.cpus for c in commands if isinstance(c, RunAction)}


def end(stage: Stage, name: str, host: str = "H1") -> dict[str, int]:
    return started(stage.feed(ev.ActionFinished, ActionId(name), HostId(host), 1.0))


def test_fixed_units_are_given_to_every_elastic_action() -> None:
    stage = stage_of(f"{FIXED},units=4")
    assert started(stage.act("a1", "a", cpus=(1, 8))) == {"a1": 4}
    assert started(stage.act("b1", "b", cpus=(1, 2))) == {"b1": 2}, "its most"
    assert started(stage.act("c1", "c", cpus=(1, 8))) == {}, "two are free, four are not"
    assert end(stage, "b1") == {"c1": 4}


def test_more_fixed_units_than_any_host_has_are_as_many_as_it_has() -> None:
    assert started(stage_of(f"{FIXED},units=16", 4).act("a1", "a", cpus=(1, 32))) == {"a1": 4}


def test_a_trajectory_keeps_its_sandbox_until_it_ends() -> None:
    stage = stage_of(f"{PER_TRAJECTORY},cpus=4", 8)
    assert started(stage.act("a1", "a", cpus=(1, 8))) == {"a1": 4}
    assert started(stage.act("b1", "b")) == {"b1": 1}
    end(stage, "b1")
    assert started(stage.act("c1", "c")) == {}, "both sandboxes are taken, though cores idle"
    assert started(stage.act("b2", "b", cpus=(1, 8))) == {"b2": 4}
    assert started(stage.act("a2", "a")) == {}, "its sandbox is busy"
    assert end(stage, "a1") == {"a2": 1}
    end(stage, "b2")
    assert started(stage.end("b")) == {"c1": 1}


def test_with_a_smaller_request_more_trajectories_share_a_host() -> None:
    stage = stage_of(f"{PER_TRAJECTORY},cpus=4,request=2", 6)
    assert started(stage.act("a1", "a", cpus=(1, 8))) == {"a1": 4}
    assert started(stage.act("b1", "b", cpus=(1, 8))) == {"b1": 2}, "what is free, up to four"
    assert started(stage.act("c1", "c", cpus=(1, 8))) == {}
    assert end(stage, "a1") == {"c1": 4}


def test_a_sandbox_on_a_lost_host_starts_anew_elsewhere() -> None:
    stage = stage_of(f"{PER_TRAJECTORY},cpus=4", 4)
    stage.act("a1", "a")
    assert stage.feed(ev.HostLost, HostId("H1")) == []
    assert started(stage.add_host("H2", 4)) == {"a1": 1}


def test_each_kind_has_its_own_workers() -> None:
    stage = stage_of(f"{WORKER_POOLS},workers=2,units=1,kinds=test:1x3")
    assert started(stage.act("a1", "a", cpus=(1, 8))) == {"a1": 3}
    assert started(stage.act("b1", "b", cpus=(1, 8))) == {}, "the one worker of its kind is busy"
    assert end(stage, "a1") == {"b1": 3}


@pytest.mark.parametrize(
    "actions",
    [
        f"{FIXED},units=0",
        f"{PER_TRAJECTORY},cpus=0",
        f"{PER_TRAJECTORY},cpus=2,request=3",
        f"{WORKER_POOLS},workers=0",
        f"{WORKER_POOLS},kinds=a:0x1",
        f"{WORKER_POOLS},kinds=a",
    ],
)
def test_bad_options_of_baselines_are_refused_in_one_line(actions: str) -> None:
    with pytest.raises(BadInput) as refusal:
        Strategy("verl", [f"actions={actions}"])
    assert "\n" not in str(refusal.value)


def test_hosts_that_know_the_rest_of_each_suite_do_all_the_work() -> None:
    ours = Pool(1, 8, 1).job("fcfs-minimum")
    plain, short_first = (
        run_cpu_job(replace(ours, weights=HostWeights(1, 8, first, power)))
        for first, power in ((1.0, 0.0), (16.0, 3.0))
    )
    assert plain.completed == short_first.completed == 16 and plain.actions == short_first.actions
    assert short_first.rewards_act_s < plain.rewards_act_s and short_first.commands_act_s > plain.commands_act_s


@given(
    st.floats(0.5, 64.0),
    st.lists(st.tuples(st.floats(0.5, 32.0), st.floats(0.01, 64.0)), min_size=1, max_size=8),
)
def test_cpus_by_weight_are_used_and_none_has_more_than_its_limit(cpus: float, jobs: list[tuple[float, float]]) -> None:
    limits, weights = (list(each) for each in zip(*jobs, strict=True))
    given_cpus = filled(cpus, limits, weights)
    assert sum(given_cpus) == pytest.approx(min(cpus, sum(limits)))
    level = max((one / weight for one, weight in zip(given_cpus, weights, strict=True)), default=0.0)
    for one, limit, weight in zip(given_cpus, limits, weights, strict=True):
        assert one == pytest.approx(limit) or one == pytest.approx(level * weight)
