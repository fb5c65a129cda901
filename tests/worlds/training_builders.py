"""Trajectories and groups for the tests of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from worlds.record_builders import make_step, plain_trajectory

from heddle_dask.records.token_record import Attribution, TokenRecord
from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord
from heddle_dask.training.buffer_events import BufferedGroup
from heddle_dask.training.groups import FinishedGroup, TrainingBatch


def sampled_step(index: int, start: int, stop: int, branch: int = 0, temperature: float = 1.0) -> StepRecord:
    """A finished step that could be trained on."""
    return replace(make_step(index, branch, start, stop), temperature=temperature, top_p=1.0, top_k=0, min_p=0.0)


def trained_record(
    name: str,
    group: str,
    reward: float | None,
    versions: Sequence[int] = (0,),
    tokens: int = 4,
    temperature: float = 1.0,
) -> TrajectoryRecord:
    """A trajectory of one step for each version: prompt, sampled tokens, tool output, sampled tokens, …"""
    record, steps = TokenRecord(), []
    record.append([1, 2, 3], Attribution.PROMPT)
    for index, version in enumerate(versions):
        if index:
            record.append([7, 8], Attribution.TOOL)
        start = len(record)
        logprobs = -0.25 * (1 + np.arange(tokens, dtype=np.float32))
        record.append_sampled(range(10, 10 + tokens), logprobs, version)
        steps.append(sampled_step(index, start, len(record), temperature=temperature))
    return replace(
        plain_trajectory(0),
        trajectory_id=name,
        group_id=group,
        task_id=f"task-of-{group}",
        reward=reward,
        branches=(record,),
        steps=tuple(steps),
        actions=(),
    )


def finished_group(
    name: str,
    rewards: Sequence[float | None] = (0.0, 1.0),
    version: int = 0,
    environment: str = "math",
    late_for: str = "",
) -> FinishedGroup:
    """A delivered group; its members are ``NAME/0``, ``NAME/1``, …"""
    records = tuple(trained_record(f"{name}/{index}", name, reward, (version,)) for index, reward in enumerate(rewards))
    return FinishedGroup(name, f"task-of-{name}", environment, records, late_for=late_for)


def buffered(
    name: str,
    version: int = 0,
    rewards: Sequence[float] = (0.0, 1.0),
    lineage: str = "a",
    environment: str = "math",
    late_for: str = "",
    earlier_rewards: Sequence[float] = (),
) -> BufferedGroup:
    """A group as the buffer knows it."""
    count = len(rewards)
    return BufferedGroup(
        name,
        f"task-of-{name}",
        environment,
        lineage,
        tuple(f"{name}/{index}" for index in range(count)),
        tuple(rewards),
        (version,) * count,
        (4,) * count,
        (False,) * count,
        late_for,
        tuple(earlier_rewards),
    )


def assert_same_batch(one: TrainingBatch, other: TrainingBatch) -> None:
    """Equal in every number, nan equal to nan."""
    assert (one.step, one.lineage) == (other.step, other.lineage)
    for left, right in zip(one.groups, other.groups, strict=True):
        assert BufferedGroup.of(left) == BufferedGroup.of(right)
        for member, same in zip(left.members, right.members, strict=True):
            assert (member.masked, member.turn_rewards) == (same.masked, same.turn_rewards)
            for sequence, equal in zip(member.sequences, same.sequences, strict=True):
                for name in sequence.__slots__:
                    found, expected = getattr(sequence, name), getattr(equal, name)
                    assert found.dtype == expected.dtype
                    np.testing.assert_array_equal(found, expected)
