"""Trajectories for the tests of the records: plain ones by hand, odd ones by hypothesis."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import (
    ActionRecord,
    Cause,
    Status,
    StepRecord,
    TrajectoryRecord,
    trajectory_to_body,
)

Contexts = list[list[int]]

# No time limits: the machine may be busy. Those that make a store per example make few.
steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(steady, max_examples=8)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)
texts = st.text(max_size=20)
seconds = st.one_of(st.just(math.nan), st.floats(-1e12, 1e12))
logprob = st.one_of(st.just(math.nan), st.floats(max_value=0, width=32))


def plain_trajectory(index: int, steps: int = 3, tokens: int = 5) -> TrajectoryRecord:
    """A completed trajectory with ids that tell where they come from."""
    record, step_records, actions = TokenRecord(), [], []
    record.append(range(1000 * index, 1000 * index + tokens), Attribution.PROMPT)
    for step in range(steps):
        start = len(record)
        record.append_sampled(range(tokens), [-0.5] * tokens, policy_version=step)
        step_records.append(make_step(step, 0, start, len(record)))
        actions.append(make_action(step))
        record.append([7] * tokens, Attribution.TOOL)
    return TrajectoryRecord(
        trajectory_id=f"t{index}",
        group_id=f"g{index // 2}",
        task_id=f"task-{index // 2}",
        environment="math",
        sample_index=index % 2,
        seed=index,
        status="completed",
        cause="",
        detail="",
        reward=float(index % 2),
        branches=(record,),
        steps=tuple(step_records),
        actions=tuple(actions),
        started_s=float(index),
        finished_s=float(index + 10),
    )


def make_step(index: int, branch: int, start: int, stop: int) -> StepRecord:
    return StepRecord(
        step_index=index,
        branch=branch,
        token_start=start,
        token_stop=stop,
        engine_id=f"engine-{index % 2}",
        finish_reason="stop",
        prompt_tokens=start,
        generated_tokens=stop - start,
        cached_tokens=start // 2,
        preemptions=index % 2,
        migrations=0,
        submitted_s=index + 0.25,
        finished_s=index + 0.75,
        queue_s=math.nan,
        prefill_s=0.125,
        decode_s=0.25,
    )


def make_action(index: int) -> ActionRecord:
    return ActionRecord(index, index, "tool", "python", 1, "ok", 1.0, 2.0, 0.25, 0.75)


@st.composite
def agent_runs(draw: Any) -> tuple[tuple[TokenRecord, ...], tuple[StepRecord, ...], Contexts]:
    """Branches, steps and the context given at each step, of an agent that also forks."""
    current = TokenRecord()
    current.append(draw(token_ids), Attribution.PROMPT)
    branches = [current]
    steps: list[StepRecord] = []
    contexts: Contexts = []
    for move in draw(st.lists(st.sampled_from(["step", "tool", "template", "fork"]), max_size=8)):
        if move == "step":
            ids = draw(token_ids)
            logprobs = draw(st.lists(logprob, min_size=len(ids), max_size=len(ids)))
            contexts.append(current.token_ids.tolist())
            start = len(current)
            current.append_sampled(ids, logprobs, draw(st.integers(0, 2**31 - 1)))
            steps.append(
                replace(
                    make_step(len(steps), len(branches) - 1, start, len(current)),
                    engine_id=draw(texts),
                    decode_s=draw(seconds),
                    temperature=draw(seconds),
                    top_k=draw(st.integers(0, 2**31 - 1)),
                )
            )
        elif move == "fork":
            current = current.fork(draw(st.integers(0, len(current))))
            branches.append(current)
        else:
            current.append(draw(token_ids), Attribution[move.upper()])
    return tuple(branches), tuple(steps), contexts


@st.composite
def trajectories(draw: Any, trajectory_id: str = "t") -> tuple[TrajectoryRecord, Contexts]:
    branches, steps, contexts = draw(agent_runs())
    record = TrajectoryRecord(
        trajectory_id=trajectory_id,
        group_id=draw(texts),
        task_id=draw(texts),
        environment=draw(texts),
        sample_index=draw(st.integers(0, 2**31 - 1)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        status=draw(st.sampled_from(get_args(Status))),
        cause=draw(st.sampled_from(get_args(Cause))),
        detail=draw(st.text(max_size=200)),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        branches=branches,
        steps=steps,
        actions=tuple(
            replace(make_action(index), label=draw(texts), run_s=draw(seconds))
            for index in range(draw(st.integers(0, 3)))
        ),
        started_s=draw(seconds),
        finished_s=draw(seconds),
        domain=draw(texts),
        message_tokens=draw(st.integers(0, 2**40)),
        max_steps=draw(st.integers(0, 2**31)),
        reward_parts=draw(st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False), max_size=2)),
        metadata=draw(st.dictionaries(texts, st.none() | st.integers() | texts, max_size=2)),
    )
    return record, contexts


@st.composite
def many_trajectories(draw: Any, min_size: int = 0, max_size: int = 4) -> list[tuple[TrajectoryRecord, Contexts]]:
    count = draw(st.integers(min_size, max_size))
    return [draw(trajectories(f"t{index}")) for index in range(count)]


def exact(record: TrajectoryRecord) -> str:
    """A text that is equal for equal records and no others; nan equals nan, -0.0 is not 0.0."""
    return json.dumps(trajectory_to_body(record))


def assert_same(left: TrajectoryRecord, right: TrajectoryRecord) -> None:
    assert exact(left) == exact(right)
    for one, other in zip(left.branches, right.branches, strict=True):
        assert one == other
        assert one.logprobs.dtype == np.float32
