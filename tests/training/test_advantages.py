"""Advantages of the members of a group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.record_builders import steady
from worlds.training_builders import finished_group, trained_record

from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import TURN_REWARDS
from heddle_dask.training.advantages import STD_FLOOR, advantage_function, less_mean
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.groups import FinishedGroup, TrainingBatch
from heddle_dask.training.sample_rows import sample_rows


def group(rewards, earlier=()):
    return trajectory_group(finished_group("g", rewards, late_for="f" if earlier else ""), "a", earlier)


def twice(one):
    """A function of a user."""
    return [2 * member.reward for member in one.members]


def by_turn(one):
    """A function of a user with one number for each turn."""
    return [np.array([member.reward, 7.0]) for member in one.members]


def wrong_length(one):
    return [0.0]


def not_finite(one):
    return [1.0, float("nan"), float("-inf")]


@steady
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_group_relative_against_plain_sums(rewards):
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    np.testing.assert_allclose(advantage_function("mean")(group(rewards)), [r - mean for r in rewards], atol=1e-9)
    expected = [(r - mean) / (std + STD_FLOOR) for r in rewards]
    np.testing.assert_allclose(advantage_function("mean-std")(group(rewards)), expected, rtol=1e-6, atol=1e-6)


def test_members_that_were_delivered_count_and_those_without_a_reward_do_not():
    assert advantage_function("mean")(group((0.0, None, 1.0))).tolist() == [-0.5, 0.5]


def test_late_members_are_compared_with_earlier_ones():
    assert advantage_function("mean")(group((1.0,), earlier=(0.0, 0.5))).tolist() == [0.5]


def test_a_function_of_the_user():
    assert advantage_function(f"{__name__}:twice")(group((0.0, 1.0))) == [0.0, 2.0]


def in_turns(*turn_rewards, earlier=()):
    """A group whose members have these rewards of turns, of two tokens each."""
    members = [
        replace(
            trained_record(f"m{at}", "g", sum(rewards), versions=(0,) * len(rewards), tokens=2),
            metadata={TURN_REWARDS: [*rewards]},
        )
        for at, rewards in enumerate(turn_rewards)
    ]
    return trajectory_group(FinishedGroup("g", "t", "math", tuple(members)), "a", earlier)


@steady
@given(st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=2, max_size=5))
def test_a_turn_is_compared_by_what_followed_with_the_same_turn_of_the_others(turn_rewards):
    given_group = in_turns(*turn_rewards)
    found = advantage_function("mean")(given_group)
    over_std = advantage_function("mean-std")(given_group)
    for at, rewards in enumerate(turn_rewards):
        for turn in range(len(rewards)):
            here = [sum(other[min(turn, len(other) - 1) :]) for other in turn_rewards]
            mean = sum(here) / len(here)
            std = (sum((r - mean) ** 2 for r in here) / (len(here) - 1)) ** 0.5
            assert found[at][turn] == pytest.approx(sum(rewards[turn:]) - mean)
            assert over_std[at][turn] == pytest.approx((sum(rewards[turn:]) - mean) / (std + STD_FLOOR), abs=1e-6)


def test_late_members_are_compared_as_wholes_since_turns_of_the_earlier_ones_are_not_known():
    late = in_turns([1.0, 0.0], [0.0], earlier=(1.0, 0.0))
    assert advantage_function("mean")(late).tolist() == [0.5, -0.5]


def test_rewards_of_last_turns_alone_are_those_of_trajectories():
    last = in_turns([0.0, 0.0, 1.0], [0.0], [0.0, 0.5])
    plain = group((1.0, 0.0, 0.5))
    for name in ("mean", "mean-std"):
        for turns, whole in zip(advantage_function(name)(last), advantage_function(name)(plain), strict=True):
            np.testing.assert_allclose(turns, whole)


@pytest.mark.parametrize("function", ["mean", f"{__name__}:by_turn"])
def test_the_tokens_of_a_turn_have_its_advantage(function):
    one = in_turns([1.0, 0.0], [0.0, 0.5])
    first, _ = sample_rows(TrainingBatch(1, "a", (one,)), advantage_function(function))
    expected = [0.25, -0.25] if function == "mean" else [1.0, 7.0]
    assert first.token_advantages[first.trained].tolist() == [expected[0]] * 2 + [expected[1]] * 2
    assert not first.token_advantages[~first.trained].any()
    assert first.advantage == np.mean(expected)


@pytest.mark.parametrize("function", [less_mean, twice])
def test_a_masked_member_counts_in_its_group_and_is_not_trained_on(function):
    one = group((0.0, 1.0, 0.5))
    one = replace(one, members=(replace(one.members[0], masked=True), *one.members[1:]))
    rows = list(sample_rows(TrainingBatch(1, "a", (one,)), function))
    assert [row.trajectory_id for row in rows] == [member.trajectory_id for member in one.members[1:]]
    assert [row.advantage for row in rows] == list(function(one)[1:])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("median", "no such function: use mean, mean-std or package.module:function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        (f"{__name__}:no_such_function", "no_such_function"),
        (f"{__name__}:pytest", "is no function"),
    ],
)
def test_a_name_without_a_function_is_refused(name, said):
    with pytest.raises(BadInput, match=said):
        advantage_function(name)


def test_what_a_function_of_the_user_returns_is_checked():
    with pytest.raises(BadInput, match="give one number for each member"):
        advantage_function(f"{__name__}:wrong_length")(group((0.0, 1.0, 0.5)))


def test_a_member_whose_advantage_is_not_finite_is_not_trained_on(caplog):
    members = group((0.0, 1.0, 0.5))
    batch = TrainingBatch(1, "a", (members,))
    rows = list(sample_rows(batch, advantage_function(f"{__name__}:not_finite")))
    assert {row.trajectory_id for row in rows} == {members.members[0].trajectory_id}
    assert all(member.trajectory_id in caplog.text for member in members.members[1:])
