"""How many groups and members run, and how many of them count (RollArt, section 4.7)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import StalenessBound, WeightUpdatePolicy

LateMembers = Literal["cancel", "keep"]


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
        """Attempts of a group that are started."""
        return self.members + self.extra_members
