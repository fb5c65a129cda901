"""Groups of a simulated training run, from their start until a batch takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from heddle_dask.training.buffer_events import BufferedGroup
from heddle_dask.workloads.planned import PlannedTrajectory

DrawGroup = Callable[[int, int], Sequence[PlannedTrajectory]]
"""The members of a task's group by the number of the task and of the attempt; names differ between all of them."""


@dataclass(slots=True, eq=False)
class SampleGroup:
    """A group from its request until a batch takes it.

    Attributes
    ----------
    task, attempt
        The task, and how often it was requested before.
    needed
        Members that complete it.
    batch
        The batch in which it has its place by the order of starts, from 1.
    has_spread
        Whether its members have different rewards.
    is_dropped
        Whether it was cancelled.
    done
        Names of members that have ended, in order.
    """

    task: int
    attempt: int
    plans: tuple[PlannedTrajectory, ...]
    needed: int
    batch: int
    has_spread: bool
    is_dropped: bool = False
    done: list[str] = field(default_factory=list)

    @property
    def group_id(self) -> str:
        """Its name."""
        return self.plans[0].group_id

    @property
    def is_complete(self) -> bool:
        """Whether enough members have ended."""
        return len(self.done) >= self.needed

    @property
    def is_open(self) -> bool:
        """Whether it runs and may still be delivered."""
        return not self.is_dropped and not self.is_complete

    @property
    def delivered(self) -> list[PlannedTrajectory]:
        """The members that count."""
        counted = set(self.done[: self.needed])
        return [plan for plan in self.plans if plan.trajectory_id in counted]

    def buffered(self, first_versions: Mapping[str, int]) -> BufferedGroup:
        """The group as the sample buffer takes it."""
        members = self.delivered
        names = tuple(plan.trajectory_id for plan in members)
        rewards = tuple(float(self.has_spread and index % 2 == 0) for index in range(len(members)))
        return BufferedGroup(
            group_id=self.group_id,
            task_id=str(self.task),
            environment=self.plans[0].domain,
            lineage="",
            trajectory_ids=names,
            rewards=rewards,
            first_versions=tuple(first_versions[name] for name in names),
            sampled_tokens=tuple(plan.generated_tokens for plan in members),
            truncated=(False,) * len(members),
        )


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """What one simulated training step took, and when.

    Attributes
    ----------
    taken_s, trained_s
        When the batch was formed, and when its training step ended.
    waited_s
        Seconds for which the trainer waited for it.
    ages
        n - b of each trajectory.
    tokens
        Prompt and sampled tokens.
    lengths
        Sampled tokens of each trajectory.
    names
        The trajectories.
    """

    step: int
    taken_s: float
    trained_s: float
    waited_s: float
    ages: tuple[int, ...]
    tokens: int
    lengths: tuple[int, ...]
    names: tuple[str, ...]
