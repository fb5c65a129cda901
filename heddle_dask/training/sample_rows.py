"""The rows of a training batch: one for each sequence, in arrays that any trainer can take.

This is the documented schema of the stream of samples (`docs/training-data.md`). All arrays of a row have one entry for
each token, at the place of that token: the logprob of token t is at t, and belongs to the logits at t - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heddle_dask.training.advantages import AdvantageFunction, is_known, less_mean, token_advantages
from heddle_dask.training.groups import TokenSequence, TrainingBatch


@dataclass(frozen=True, slots=True, eq=False)
class SampleRow:
    """One sequence of a trajectory.

    Attributes
    ----------
    token_ids
        int32: context and sampled tokens.
    trained
        bool: this token is trained. Select by it; what is not trained has nan for a logprob.
    logprobs, temperatures
        float32: with which the engine sampled the token, natural logarithm after the temperature; nan where not
        trained.
    policy_versions
        int32: the version that sampled the token; -1 where not trained.
    turns
        int32: the LLM step that sampled the token, from 0; -1 where not trained.
    token_advantages
        float32: the advantage at each trained token, 0 elsewhere.
    advantage
        Of its trajectory, for every trained token; where turns have rewards of their own, the mean over its tokens.
    reward
        Of its trajectory. The rows of a trajectory share one reward: sum over trajectories, not over rows.
    first_of_trajectory
        True in one row of each trajectory.
    staleness
        n - b of its trajectory: optimiser steps between the version of its first token and this batch.
    """

    token_ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    temperatures: npt.NDArray[np.float32]
    policy_versions: npt.NDArray[np.int32]
    turns: npt.NDArray[np.int32]
    token_advantages: npt.NDArray[np.float32]
    advantage: float
    reward: float
    first_of_trajectory: bool
    trajectory_id: str
    group_id: str
    task_id: str
    environment: str
    staleness: int
    truncated: bool

    def __len__(self) -> int:
        return len(self.token_ids)


def sample_rows(batch: TrainingBatch, advantages: AdvantageFunction = less_mean) -> Iterator[SampleRow]:
    """The rows of a batch: groups, members and branches in their order, of members that are trained on.

    These are not masked, and their advantage is known.

    Raises
    ------
    BadInput
        The user's `advantages` returned something else than one number for each member.
    """
    for group in batch.groups:
        values = advantages(group)
        # Late members are of the same group as the earlier ones.
        group_id = group.late_for or group.group_id
        for member, advantage in zip(group.members, values, strict=True):
            if member.masked or not is_known(advantage):
                continue
            for index, one in enumerate(member.sequences):
                at_tokens = token_advantages(advantage, one)
                yield SampleRow(
                    **{name: getattr(one, name) for name in TokenSequence.__slots__},
                    token_advantages=at_tokens.astype(np.float32),
                    advantage=float(at_tokens[one.trained].mean()),
                    reward=member.reward,
                    first_of_trajectory=index == 0,
                    trajectory_id=member.trajectory_id,
                    group_id=group_id,
                    task_id=group.task_id,
                    environment=group.environment,
                    staleness=batch.step - 1 - member.first_version,
                    truncated=member.truncated,
                )
