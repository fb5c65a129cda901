from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.record_builders import agent_runs, exact, make_step, plain_trajectory, steady, trajectories

from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import (
    token_record_from_body,
    token_record_to_body,
    trajectory_from_body,
    trajectory_to_body,
)


def test_columns_when_two_authors_and_two_policy_versions_wrote():
    record = TokenRecord()
    record.append([1, 2], Attribution.PROMPT)
    record.append_sampled([3], [-0.5], policy_version=4)
    record.append([5], Attribution.TOOL)
    record.append([6], Attribution.TEMPLATE)
    record.append_sampled((7, 8), (-1.5, math.nan), policy_version=5)

    assert len(record) == 7
    assert record.token_ids.tolist() == [1, 2, 3, 5, 6, 7, 8]
    assert record.attribution.tolist() == [0, 0, 1, 2, 3, 1, 1]
    assert record.policy_version.tolist() == [-1, -1, 4, -1, -1, 5, 5]
    assert record.loss_mask.tolist() == [False, False, True, False, False, True, True]
    np.testing.assert_array_equal(
        record.logprobs, np.array([np.nan, np.nan, -0.5, np.nan, np.nan, -1.5, np.nan], np.float32)
    )
    assert [column.dtype.name for column in (record.token_ids, record.attribution)] == [
        "int32",
        "uint8",
    ]


def test_segments_when_authors_alternate():
    record = TokenRecord()
    record.append([1], Attribution.PROMPT)
    record.append([2], Attribution.PROMPT)
    record.append_sampled([3], [0.0], 0)
    found = [(s.attribution, s.start, s.stop, s.token_ids.tolist()) for s in record.segments()]
    assert found == [(Attribution.PROMPT, 0, 2, [1, 2]), (Attribution.POLICY, 2, 3, [3])]
    assert list(TokenRecord().segments()) == []


@steady
@given(agent_runs())
def test_segments_are_maximal_runs_that_cover_the_record(run):
    branches, _, _ = run
    for branch in branches:
        segments = list(branch.segments())
        ids = [token for segment in segments for token in segment.token_ids.tolist()]
        assert ids == branch.token_ids.tolist()
        for one, next_one in pairwise(segments):
            assert one.stop == next_one.start
            assert one.attribution != next_one.attribution


@steady
@given(agent_runs())
def test_every_context_is_a_prefix_of_its_branch(run):
    branches, steps, contexts = run
    for step, context in zip(steps, contexts, strict=True):
        assert branches[step.branch].token_ids[: step.token_start].tolist() == context


def test_history_cannot_be_rewritten_through_a_view():
    record = TokenRecord()
    record.append([1, 2], Attribution.PROMPT)
    for column in (record.token_ids, record.attribution, record.logprobs, record.policy_version):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0


@steady
@given(st.lists(st.integers(0, 400), max_size=12))
def test_views_stay_what_they_were_when_the_record_grows(sizes):
    record, views, expected = TokenRecord(), [], []
    for size in sizes:
        record.append(range(size), Attribution.TOOL)
        expected.extend(range(size))
        views.append((record.token_ids, list(expected)))
    for view, ids in views:
        assert view.tolist() == ids


def test_fork_shares_the_prefix_and_nothing_later():
    record = TokenRecord()
    record.append([1, 2], Attribution.PROMPT)
    record.append_sampled([3, 4], [-1.0, -2.0], 7)
    fork = record.fork(3)
    record.append([9], Attribution.TOOL)
    fork.append([5], Attribution.TEMPLATE)
    assert fork.token_ids.tolist() == [1, 2, 3, 5]
    assert fork.policy_version.tolist() == [-1, -1, 7, -1]
    assert record.token_ids.tolist() == [1, 2, 3, 4, 9]
    assert record.fork(0) == TokenRecord()
    with pytest.raises(ValueError, match="cannot fork at 6"):
        record.fork(6)


def test_refuses_what_is_no_token():
    record = TokenRecord()
    with pytest.raises(ValueError, match="append_sampled"):
        record.append([1], Attribution.POLICY)
    with pytest.raises(ValueError, match="2 sampled token ids but 1 logprobs"):
        record.append_sampled([1, 2], [0.0], 0)
    with pytest.raises(ValueError, match="negative"):
        record.append_sampled([1], [0.0], -1)
    with pytest.raises(TypeError, match="integers"):
        record.append([1.5], Attribution.TOOL)
    with pytest.raises(OverflowError):
        record.append([2**31], Attribution.TOOL)
    with pytest.raises(OverflowError):
        record.append([-1], Attribution.TOOL)
    assert len(record) == 0


def test_from_arrays_refuses_columns_that_do_not_fit():
    with pytest.raises(ValueError, match="differ in length"):
        TokenRecord.from_arrays([1, 2], [0], [0.0], [0])
    with pytest.raises(ValueError, match="unknown attribution 9"):
        TokenRecord.from_arrays([1], [9], [0.0], [0])


@steady
@given(agent_runs())
def test_body_of_a_token_record_is_exact(run):
    for branch in run[0]:
        body = json.loads(json.dumps(token_record_to_body(branch)))
        back = token_record_from_body(body)
        assert back == branch
        assert back.logprobs[back.loss_mask].tobytes() == branch.logprobs[branch.loss_mask].tobytes()


@steady
@given(trajectories())
def test_body_of_a_trajectory_is_exact(drawn):
    record, _ = drawn
    back = trajectory_from_body(json.loads(json.dumps(trajectory_to_body(record))))
    assert exact(back) == exact(record)
    assert back.branches == record.branches


def test_reward_of_nan_is_unknown():
    record = plain_trajectory(0)
    assert replace(record, reward=math.nan).reward is None
    assert replace(record, reward=1).reward == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "done"}, "status 'done'"),
        ({"cause": "gremlin"}, "cause 'gremlin'"),
        ({"seed": 2**63}, "seed"),
        ({"steps": (make_step(0, 1, 0, 0),)}, "branch 1 of 1"),
        ({"steps": (make_step(0, 0, 30, 40),)}, "spans tokens 30 to 40 of 35"),
        ({"steps": (make_step(0, 0, 0, 5),)}, "not sampled"),
    ],
)
def test_refuses_a_trajectory_that_contradicts_itself(change, message):
    with pytest.raises(ValueError, match=message):
        replace(plain_trajectory(0), **change)
