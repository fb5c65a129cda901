"""Evaluation beside training: held-out tasks on the same engines, in sessions of their own.

Nothing of it enters the sample buffer. The training loop keeps the version of the engines until it has ended; the row
says which versions really sampled its tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.environments.base import Environment, Task
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.token_record import NOT_SAMPLED_VERSION
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.intervals import bootstrap_mean


@dataclass(frozen=True, slots=True)
class HeldOutTasks:
    """The tasks by which weights are judged: the same ones at every evaluation."""

    environment: Environment
    tasks: Sequence[Task]
    samples: int = 1  # attempts at each task; its reward is their mean
    temperature: float = 0.0  # of the sampling; 0: greedy


class Evaluation:
    """Rolls held-out tasks out, once for each version that is asked for."""

    def __init__(
        self,
        held_out: Sequence[HeldOutTasks],  # of each environment
        # Makes a rollout of these tasks in a session of its own, on the engines of the training.
        open_rollout: Callable[[HeldOutTasks], Rollout],
    ) -> None:
        self._held_out = held_out
        self._open_rollout = open_rollout

    async def of(self, version: PolicyVersion) -> dict[str, Any]:
        """Try all tasks; returns a row for ``evaluations.jsonl``."""
        began_s = time.monotonic()
        async with AsyncExitStack() as stack:
            rollouts = [await stack.enter_async_context(self._open_rollout(each)) for each in self._held_out]
            parts = zip(rollouts, self._held_out, strict=True)
            found = await asyncio.gather(*(_records(rollout, each.tasks) for rollout, each in parts))
        by_environment = {each.environment.name: records for each, records in zip(self._held_out, found, strict=True)}
        return {
            **evaluation_row(version, by_environment),
            "temperature": [each.temperature for each in self._held_out],
            "seconds": round(time.monotonic() - began_s, 3),
        }


async def _records(rollout: Rollout, tasks: Sequence[Task]) -> list[TrajectoryRecord]:
    return [record async for record in rollout.stream(list(tasks))]


def evaluation_row(version: PolicyVersion, by_environment: Mapping[str, Sequence[TrajectoryRecord]]) -> dict[str, Any]:
    """What the trajectories of an evaluation say of its version.

    Attempts without a reward (their environment failed) count neither as success nor as failure.
    """
    rewards: dict[str, float] = {}
    means: dict[str, float | None] = {}
    for name, records in by_environment.items():
        of_tasks: dict[str, list[float]] = {}
        for record in records:
            if record.reward is not None:
                of_tasks.setdefault(f"{name}/{record.task_id}", []).append(record.reward)
        mean_of_tasks = {task: float(np.mean(values)) for task, values in of_tasks.items()}
        means[name] = float(np.mean(list(mean_of_tasks.values()))) if mean_of_tasks else None
        rewards |= mean_of_tasks
    every = [record for records in by_environment.values() for record in records]
    mean = bootstrap_mean([rewards[task] for task in sorted(rewards)]) if rewards else None
    return {
        "number": version.number,
        "lineage": version.lineage,
        "reward": mean and mean.mean,
        "reward_ci": mean and list(mean.bounds),
        "by_environment": means,
        "tasks": len(rewards),
        "samples": len(every),
        "without_reward": sum(record.reward is None for record in every),
        "tokens_by_version": _tokens_by_version(every),
        "rewards": dict(sorted(rewards.items())),
    }


def _tokens_by_version(records: Sequence[TrajectoryRecord]) -> dict[str, int]:
    tokens: Counter[int] = Counter()
    for record in records:
        for branch in record.branches:
            numbers, counts = np.unique(branch.policy_version, return_counts=True)
            tokens.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))
    tokens.pop(NOT_SAMPLED_VERSION, None)
    return {str(number): tokens[number] for number in sorted(tokens)}
