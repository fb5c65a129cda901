"""Groups that can be trained on: which tokens, with what, and which members are left out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from worlds.record_builders import agent_runs, plain_trajectory, steady
from worlds.training_builders import finished_group, sampled_step, trained_record

from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import TURN_REWARDS
from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.training.buffer_events import BufferedGroup
from heddle_dask.training.group_records import (
    training_trajectory,
    trajectory_group,
)
from heddle_dask.training.trainable_sampling import check_trainable_sampling


def test_sampled_tokens_are_trained_and_no_others():
    member = training_trajectory(trained_record("t", "g", 1.0, versions=(3, 4), tokens=2, temperature=0.7))
    (sequence,) = member.sequences
    assert sequence.token_ids.tolist() == [1, 2, 3, 10, 11, 7, 8, 10, 11]
    assert sequence.trained.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    assert sequence.logprobs[sequence.trained].tolist() == [-0.25, -0.5, -0.25, -0.5]
    assert np.isnan(sequence.logprobs[~sequence.trained]).all()
    assert sequence.temperatures[sequence.trained].tolist() == [np.float32(0.7)] * 4
    assert np.isnan(sequence.temperatures[~sequence.trained]).all()
    assert sequence.policy_versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, 4, 4]
    assert (member.first_version, member.trained_tokens, member.reward) == (3, 4, 1.0)


def test_what_follows_the_last_sampled_token_is_cut():
    record = trained_record("t", "g", 1.0, tokens=2)
    record.branches[0].append([9, 9, 9], Attribution.TOOL)
    (sequence,) = training_trajectory(record).sequences
    assert len(sequence) == 5


def test_a_token_that_branches_share_is_trained_once():
    record = trained_record("t", "g", 1.0, versions=(2,), tokens=3)
    fork = record.branches[0].shared()
    start = len(fork)
    fork.append_sampled([50, 51], [-1.0, -2.0], 5)
    kept = record.branches[0].fork(start)  # as agents of other programs fork: with the attribution of the tokens
    kept.append_sampled([60], [-3.0], 6)
    steps = (
        *record.steps,
        sampled_step(1, start, start + 2, branch=1),
        sampled_step(2, start, start + 1, branch=2),
    )
    member = training_trajectory(replace(record, branches=(record.branches[0], fork, kept), steps=steps))
    assert [one.trained.sum() for one in member.sequences] == [3, 2, 1]
    assert member.trained_tokens == 6
    assert member.first_version == 2


def test_a_branch_that_sampled_nothing_is_left_out():
    record = trained_record("t", "g", 1.0)
    member = training_trajectory(replace(record, branches=(*record.branches, record.branches[0].shared())))
    assert len(member.sequences) == 1


def test_tokens_of_a_step_that_never_ended_are_not_trained():
    record = trained_record("t", "g", 1.0, tokens=2)
    record.branches[0].append_sampled([90], [math.nan], 0)
    assert training_trajectory(record).trained_tokens == 2


def test_a_sampled_token_without_a_logprob_is_refused():
    record = trained_record("t7", "g", 1.0)
    branch = TokenRecord()
    branch.append([1, 2, 3], Attribution.PROMPT)
    branch.append_sampled([10, 11, 12, 13], [-1.0, math.nan, -1.0, math.nan], 0)
    with pytest.raises(BadInput, match=r"trajectory t7: 2 sampled tokens have no logprob, .* token 4"):
        training_trajectory(replace(record, branches=(branch,)))


def test_members_without_a_reward_are_left_out_and_too_few_make_no_group():
    group = trajectory_group(finished_group("g", (0.0, None, 1.0, None)), "a")
    assert [member.trajectory_id for member in group.members] == ["g/0", "g/2"]
    assert trajectory_group(finished_group("g", (1.0, None, None)), "a") is None


def test_late_members_count_with_those_that_came_before():
    late = finished_group("g+late", (1.0,), late_for="g")
    assert trajectory_group(late, "a") is None
    group = trajectory_group(late, "a", earlier_rewards=(0.0, 0.0))
    assert (group.late_for, group.earlier_rewards, group.has_variance) == ("g", (0.0, 0.0), True)


@pytest.mark.parametrize(
    ("truncated", "members", "masked"),
    [("count", ["g/0", "g/1", "g/2"], []), ("mask", ["g/0", "g/1", "g/2"], ["g/1"]), ("drop", ["g/0", "g/2"], [])],
)
def test_an_attempt_that_was_truncated_counts_is_masked_or_is_no_member(truncated, members, masked):
    finished = finished_group("g", (1.0, 0.0, 0.0))
    records = [replace(record, status="truncated") if at == 1 else record for at, record in enumerate(finished.records)]
    group = trajectory_group(replace(finished, records=tuple(records)), "a", truncated=truncated)
    assert [member.trajectory_id for member in group.members] == members
    assert [member.trajectory_id for member in group.members if member.masked] == masked
    assert [member.trained_tokens for member in group.members if member.masked] == [0] * len(masked)
    assert BufferedGroup.of(group).sampled_tokens == (4,) * len(members)
    every = tuple(replace(record, status="truncated") for record in records)
    whole = trajectory_group(replace(finished, records=every), "a", truncated=truncated)
    assert (whole is None) == (truncated != "count"), "nothing would be trained"


def test_a_turn_is_an_llm_step_and_what_are_no_rewards_of_turns_is_left_out(caplog):
    record = replace(trained_record("t", "g", 1.0, versions=(0, 0, 0), tokens=2), metadata={TURN_REWARDS: [0.5, 0.5]})
    member = training_trajectory(record)
    assert member.turn_rewards == (0.5, 0.5, 0.0)
    (sequence,) = member.sequences
    assert sequence.turns[sequence.trained].tolist() == [0, 0, 1, 1, 2, 2]
    assert set(sequence.turns[~sequence.trained]) == {-1}
    for odd in ([0.25] * 4, [1.0, None], [1.0, math.nan], {"a": 1.0}, "1.0", 1.0):
        assert training_trajectory(replace(record, metadata={TURN_REWARDS: odd})).turn_rewards == ()
    assert caplog.text.count("are not at most 3 numbers") == 6
    other = replace(record, metadata={TURN_REWARDS: [1.0, 1.0]})
    assert training_trajectory(other).turn_rewards == (), "another reward was given in place of theirs"


@pytest.mark.parametrize(
    ("status", "finish_reason", "truncated"),
    [("completed", "stop", False), ("completed", "length", True), ("truncated", "stop", True)],
)
def test_truncated_means_a_limit(status, finish_reason, truncated):
    record = trained_record("t", "g", 1.0)
    steps = tuple(replace(step, finish_reason=finish_reason) for step in record.steps)
    assert training_trajectory(replace(record, status=status, steps=steps)).truncated is truncated


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.0}, "temperature is 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"top_k": 20}, "top_k is 20"),
        ({"min_p": 0.05}, "min_p is 0.05"),
        ({"presence_penalty": 0.5}, "presence_penalty is 0.5"),
        ({"frequency_penalty": -0.5}, "frequency_penalty is -0.5"),
        ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1"),
        ({"structured": object()}, "structured output"),
    ],
)
def test_sampling_that_cannot_be_trained_on_is_refused_in_one_line(options, said):
    with pytest.raises(BadInput) as refused:
        check_trainable_sampling("--sampling", **({"temperature": 1.0} | options))
    assert str(refused.value).startswith(f"--sampling: {said}")
    assert "\n" not in str(refused.value)


def test_plain_sampling_may_be_trained_on():
    check_trainable_sampling("--sampling", temperature=0.7)


def test_a_step_that_was_cut_is_refused_with_the_name_of_its_trajectory():
    record = trained_record("t", "g", 1.0)
    steps = tuple(replace(step, top_p=0.9) for step in record.steps)
    with pytest.raises(BadInput, match=r"trajectory t, step 0: top_p is 0\.9"):
        training_trajectory(replace(record, steps=steps))


@steady
@given(agent_runs())
def test_every_sampled_token_of_a_finished_step_is_trained_once(drawn):
    """Brute force: the steps list their tokens; those of all sequences together are exactly these."""
    branches, steps, _ = drawn
    steps = tuple(replace(s, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) for s in steps)
    filled = tuple(
        TokenRecord.from_arrays(
            b.token_ids, b.attribution, np.nan_to_num(b.logprobs, nan=-1.0, neginf=-9.0), b.policy_version
        )
        for b in branches
    )
    record = replace(plain_trajectory(0), branches=filled, steps=steps, actions=(), reward=0.5)
    member = training_trajectory(record)
    expected = [(s.branch, at) for s in steps for at in range(s.token_start, s.token_stop)]
    if not expected:
        assert member is None
        return
    assert len(set(expected)) == len(expected)
    used = sorted({branch for branch, _ in expected})
    found = [
        (branch, int(at))
        for branch, one in zip(used, member.sequences, strict=True)
        for at in np.flatnonzero(one.trained)
    ]
    assert sorted(found) == sorted(expected)
    for branch, one in zip(used, member.sequences, strict=True):
        assert one.token_ids.tolist() == filled[branch].token_ids[: len(one)].tolist()
