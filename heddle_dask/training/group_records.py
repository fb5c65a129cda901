"""Groups of stored trajectories become groups that can be trained on.

Only sampled tokens are trained. A finished LLM step says which tokens of its branch it sampled and at which
temperature; tokens that a branch repeats of the one that it left belong to no step of its own, so a shared token is
trained once. A member without a reward (its environment failed, or nothing computed one) is left out: a failure never
becomes a reward.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.run_description import TURN_REWARDS
from heddle_dask.records.token_record import NOT_SAMPLED_VERSION, TokenRecord
from heddle_dask.records.trajectory import StepRecord, TrajectoryRecord
from heddle_dask.training.groups import (
    FinishedGroup,
    TokenSequence,
    TrainingTrajectory,
    TrajectoryGroup,
    TruncatedAttempts,
)
from heddle_dask.training.trainable_sampling import check_step_is_trainable

logger = logging.getLogger(__name__)

FEWEST_MEMBERS = 2
"""Advantages are relative to the other members of a group."""

TOO_FEW = "too-few-members"
"""Cause of a drop: fewer members than `FEWEST_MEMBERS` have a reward and a sampled token."""


def trajectory_group(
    finished: FinishedGroup,
    lineage: str,
    earlier_rewards: tuple[float, ...] = (),
    truncated: TruncatedAttempts = "count",
) -> TrajectoryGroup | None:
    """The part of a group that can be trained on; None: too few members have a reward and a sampled token.

    Parameters
    ----------
    lineage
        The line of training whose weights sampled it.
    earlier_rewards
        Of late members (`FinishedGroup.late_for`): rewards of the members that were delivered before.
    truncated
        What becomes of attempts that ended at a limit.

    Raises
    ------
    BadInput
        A sampled token has no logprob, or was sampled in a way that cannot be trained on (`trainable_sampling`); the
        message names the trajectory.
    """
    taken = [record for record in finished.records if truncated != "drop" or not was_truncated(record)]
    members = tuple(member for record in taken if (member := training_trajectory(record, truncated)) is not None)
    if all(member.masked for member in members) or len(members) + len(earlier_rewards) < FEWEST_MEMBERS:
        return None
    return TrajectoryGroup(
        finished.group_id,
        finished.task_id,
        finished.environment,
        lineage,
        members,
        finished.late_for,
        earlier_rewards,
    )


def training_trajectory(record: TrajectoryRecord, truncated: TruncatedAttempts = "count") -> TrainingTrajectory | None:
    """A trajectory that can be trained on; None if it has no reward or no sampled token.

    Raises
    ------
    BadInput
        As `trajectory_group`.
    """
    if record.reward is None:
        return None
    sequences = []
    first: StepRecord | None = None
    for index, branch in enumerate(record.branches):
        steps = [step for step in record.steps if step.branch == index and step.generated_tokens]
        if not steps:
            continue  # a branch that sampled nothing teaches nothing
        sequences.append(_sequence(record.trajectory_id, branch, steps))
        earliest = min(steps, key=lambda step: (step.submitted_s, step.token_start))
        if first is None or earliest.submitted_s < first.submitted_s:
            first = earliest
    if first is None:
        return None
    first_version = int(record.branches[first.branch].policy_version[first.token_start])
    is_truncated = was_truncated(record)
    return TrainingTrajectory(
        record.trajectory_id,
        record.reward,
        tuple(sequences),
        first_version,
        is_truncated,
        masked=is_truncated and truncated == "mask",
        turn_rewards=_turn_rewards(record),
    )


def _turn_rewards(record: TrajectoryRecord) -> tuple[float, ...]:
    """Those of its turns; none where the reward of the whole was replaced, or what is there is something else."""
    given: Any = record.metadata.get(TURN_REWARDS)
    if not given or record.reward is None:
        return ()
    turns = 1 + max(step.step_index for step in record.steps)
    if not isinstance(given, (list, tuple)) or not all(map(is_finite, given)) or len(given) > turns:
        logger.warning(
            "trajectory %s: its %r are not at most %d numbers, one for each LLM step in order: its reward counts as "
            "that of the whole",
            record.trajectory_id,
            TURN_REWARDS,
            turns,
        )
        return ()
    if not math.isclose(math.fsum(given), record.reward, abs_tol=1e-6):
        return ()
    return (*(float(reward) for reward in given), *[0.0] * (turns - len(given)))


def was_truncated(record: TrajectoryRecord) -> bool:
    """Whether it ended at a limit of tokens, steps or time, or its last step at the limit of the step."""
    if record.status != "completed":
        return record.status == "truncated"
    return bool(record.steps) and record.steps[-1].finish_reason == "length"


def _sequence(trajectory_id: str, branch: TokenRecord, steps: list[StepRecord]) -> TokenSequence:
    """One branch up to its last sampled token: what follows has no influence on it."""
    length = max(step.token_stop for step in steps)
    trained = np.zeros(length, np.bool_)
    temperatures = np.full(length, np.nan, np.float32)
    turns = np.full(length, -1, np.int32)
    for step in steps:
        check_step_is_trainable(f"trajectory {trajectory_id}, step {step.step_index}", step)
        trained[step.token_start : step.token_stop] = True
        temperatures[step.token_start : step.token_stop] = step.temperature
        turns[step.token_start : step.token_stop] = step.step_index
    logprobs = branch.logprobs[:length]
    _check_logprobs(trajectory_id, logprobs, trained)
    return TokenSequence(
        token_ids=branch.token_ids[:length].copy(),
        trained=trained,
        logprobs=np.where(trained, logprobs, np.float32(np.nan)),
        temperatures=temperatures,
        policy_versions=np.where(trained, branch.policy_version[:length], np.int32(NOT_SAMPLED_VERSION)),
        turns=turns,
    )


def _check_logprobs(trajectory_id: str, logprobs: npt.NDArray[np.float32], trained: npt.NDArray[np.bool_]) -> None:
    missing = np.flatnonzero(trained & ~np.isfinite(logprobs))
    if len(missing):
        raise BadInput(
            f"trajectory {trajectory_id}: {len(missing)} sampled tokens have no logprob, the first of them is token "
            f"{missing[0]}: use engines that return logprobs"
        )
