"""The workload of software tasks: its numbers, and that a trajectory depends on its group alone."""

from __future__ import annotations

import statistics

import pytest
from worlds.action_worlds import shortest_s

from benchmarks.actions.software_workload import SHORTEST_S, SoftwareWorkload, action_trajectories
from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.planned import PlannedTrajectory


def drawn(trajectories: int = 640, seed: int = 1, **numbers: object) -> list[PlannedTrajectory]:
    workload = SoftwareWorkload(**numbers)  # type: ignore[arg-type]
    return action_trajectories(workload, trajectories=trajectories, samples=16, seed=seed, max_context_tokens=40_960)


def test_commands_and_rewards_have_the_means_that_are_asked_for() -> None:
    plans = drawn(3200)
    commands = [step.action.profile.one_unit_s for plan in plans for step in plan.steps if step.action]
    rewards = [plan.rewards[0].profile.one_unit_s for plan in plans]
    assert statistics.fmean(commands) == pytest.approx(1.0, rel=0.05)
    assert statistics.fmean(rewards) == pytest.approx(60.0, rel=0.1)
    assert min(commands) >= SHORTEST_S and max(rewards) <= 1_800.0


def test_more_trajectories_do_not_change_the_first_ones() -> None:
    assert drawn(64) == drawn(128)[:64]
    assert drawn(64) != drawn(64, seed=2)


def test_every_step_but_the_last_calls_a_command() -> None:
    for plan in drawn(64):
        assert all(step.action is not None and step.tool_s == shortest_s(step.action) for step in plan.steps[:-1])
        assert plan.steps[-1].tool is None and plan.context_tokens <= 40_960
        (reward,) = plan.rewards
        assert reward.demand["cpus"].most == 32 and reward.declared == reward.profile


def test_wrong_profiles_are_wrong_by_the_factor_in_both_directions() -> None:
    factors = []
    for plan in drawn(320, profiles="wrong"):
        (reward,) = plan.rewards
        assert reward.declared is not None
        factors.append(reward.declared.one_unit_s / reward.profile.one_unit_s)
    assert {round(factor, 9) for factor in factors} == {0.5, 2.0}
    assert all(plan.rewards[0].declared is None for plan in drawn(32, profiles="none"))


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(BadInput, match="serial share"):
        SoftwareWorkload(serial_share=1.5)
    with pytest.raises(BadInput, match="true, none or wrong"):
        SoftwareWorkload(profiles="guessed")
    with pytest.raises(BadInput, match="100 trajectories of 16"):
        drawn(100)
