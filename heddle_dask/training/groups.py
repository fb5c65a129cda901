"""Groups of trajectories as a trainer takes them, and how many of them run.

A `FinishedGroup` is what the driver delivers. A `TrajectoryGroup` is its part that can be trained on: arrays, without
text, and only tokens that the policy sampled are marked as trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import StalenessBound, WeightUpdatePolicy
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.prefix_sampling import PrefixRule

LateMembers = Literal["cancel", "keep"]
TruncatedAttempts = Literal["count", "mask", "drop"]
"""``"count"``: an attempt that ended at a limit is a member as any other. ``"mask"``: its reward counts in its group,
and none of its tokens is trained. ``"drop"``: it is no member."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The groups of `Rollout.stream_groups`.

    Attributes
    ----------
    members
        Attempts of a group that must end before it is delivered.
    extra_members
        Attempts of a group that run beyond these. The first to end count.
    groups_per_batch
        Groups that one batch takes.
    extra_groups
        Groups that run beyond those that the open batches lack. The first to end count.
    late_members
        ``"cancel"``: when enough have ended, the others are cancelled, and their tokens counted as waste.
        ``"keep"``: none is cancelled. Late members are delivered together as a group of their own
        (`FinishedGroup.late_for`), and late groups count for the next batch.
    max_repeats
        How often the task of a group that became too old is asked for again.
    max_running
        Most trajectories that are announced and have not ended; None: twice the slots of the engines, and at least one
        group.
    staleness
        The bound on the age of trajectories, which the scheduler keeps; None: there is none.
    weights
        How engines go over to new weights.
    prefixes
        When groups go on from a prefix of an earlier attempt; None: never.

    Raises
    ------
    BadInput
    """

    members: int
    extra_members: int = 0
    groups_per_batch: int = 1
    extra_groups: int = 0
    late_members: LateMembers = "cancel"
    max_repeats: int = 3
    max_running: int | None = None
    staleness: StalenessBound | None = None
    weights: WeightUpdatePolicy = field(default_factory=WeightUpdatePolicy)
    prefixes: PrefixRule | None = None

    def __post_init__(self) -> None:
        least = {"members": 1, "extra_members": 0, "groups_per_batch": 1, "extra_groups": 0, "max_repeats": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise BadInput(f"{name} is {value!r}: use a whole number of at least {lowest}")
        if self.late_members not in get_args(LateMembers):
            raise BadInput(f"late_members is {self.late_members!r}: use cancel or keep")
        if self.max_running is not None and self.max_running < self.attempts:
            raise BadInput(
                f"max_running is {self.max_running}, and a group has {self.attempts} attempts: use at least as many"
            )

    @property
    def attempts(self) -> int:
        return self.members + self.extra_members


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """All members of one group that count, delivered when the last of them has ended.

    Attributes
    ----------
    group_id
        Unique in the run; a task that is requested again gets another one.
    task_id
        The task that all members attempted.
    environment
        Name of its environment, as in the mix of tasks.
    records
        The members that were delivered, failed ones included, in the order of their ends.
    cancelled_tokens
        Generated tokens of members that were cancelled, by cause.
    late_for
        Id of the group that was delivered without these members, because they were late; empty for a whole group.
    """

    group_id: str
    task_id: str
    environment: str
    records: tuple[TrajectoryRecord, ...]
    cancelled_tokens: Mapping[str, int] = field(default_factory=dict)
    late_for: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """One branch of a trajectory. All arrays have one entry for each token.

    Attributes
    ----------
    token_ids
        Context and sampled tokens in order, as the engines had them.
    trained
        Whether the policy sampled this token and it is trained here. A token that several branches share is trained in
        the first of them only.
    logprobs, temperatures
        Natural logarithm of the probability with which the engine sampled the token, and the temperature it sampled
        with; nan where `trained` is False.
    policy_versions
        Number of the version that sampled the token; -1 where `trained` is False.
    turns
        Number of the LLM step that sampled the token, from 0; -1 where `trained` is False.
    """

    token_ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    temperatures: npt.NDArray[np.float32]
    policy_versions: npt.NDArray[np.int32]
    turns: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTrajectory:
    """One member of a group, with its reward.

    Attributes
    ----------
    first_version
        Number of the version that sampled its first token.
    truncated
        Whether it ended at a limit of tokens, steps or time.
    masked
        Its reward counts in its group, and it is not trained on.
    turn_rewards
        Reward of each LLM step (`environments.base.Reward.turns`); empty: only the whole has one.
    """

    trajectory_id: str
    reward: float
    sequences: tuple[TokenSequence, ...]
    first_version: int
    truncated: bool = False
    masked: bool = False
    turn_rewards: tuple[float, ...] = ()

    @property
    def sampled_tokens(self) -> int:
        return sum(int(one.trained.sum()) for one in self.sequences)

    @property
    def trained_tokens(self) -> int:
        return 0 if self.masked else self.sampled_tokens


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryGroup:
    """Attempts at one task, of which each has a reward.

    Attributes
    ----------
    lineage
        The line of training whose weights sampled it (`core.ids`).
    late_for, earlier_rewards
        Of members that came late: the id of their group, and the rewards of its members that were delivered before.
        Advantages are relative to all of them; only the late ones are trained here.
    """

    group_id: str
    task_id: str
    environment: str
    lineage: str
    members: tuple[TrainingTrajectory, ...]
    late_for: str = ""
    earlier_rewards: tuple[float, ...] = ()

    @property
    def first_version(self) -> int:
        """The version of its oldest member: a group is as old as that."""
        return min(member.first_version for member in self.members)

    @property
    def has_variance(self) -> bool:
        """Whether its rewards differ: without, every advantage is 0."""
        return len({*self.earlier_rewards, *(member.reward for member in self.members)}) > 1


@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """What one optimiser step takes.

    Attributes
    ----------
    step
        Number of the optimiser step that takes it, from 1: afterwards n = `step`.
    """

    step: int
    lineage: str
    groups: tuple[TrajectoryGroup, ...]

    @property
    def trajectories(self) -> int:
        return sum(len(group.members) for group in self.groups)
