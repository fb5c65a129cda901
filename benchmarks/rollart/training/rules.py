"""How a simulated training run works: its order, its bound on staleness, its redundancy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import (
    RunDescription,
    StalenessBound,
    StalenessMode,
    UpdateOrder,
    WeightUpdatePolicy,
)
from heddle_dask.training.plan import Mode, SwitchOrder, TrainingPlan, plan_of_mode
from heddle_dask.training.sample_buffer import BatchRule

_UNBOUNDED = 10**6
"""Steps: older than any sample of a run."""


@dataclass(frozen=True, slots=True)
class TrainingRules:
    """One arm.

    Attributes
    ----------
    mode
        ``"sync"``: rollout, rewards, train, publish, install, and again. ``"one-off"``: trains on a batch while the
        next one is rolled out; weights change between batches only. ``"async"``: trajectories never wait for a batch.
    groups, members
        Groups of a batch, and trajectories of a group.
    alpha, staleness
        The bound (`core.run_description`); with ``"async"`` only.
    depth
        As in `training.plan`; None: that of the mode.
    checks
        ``"turns"``: the bound is checked at all times. ``"start"``: only by the credits of a start, as AReaL does; a
        batch takes whatever finished first, and may exceed the bound.
    switch
        As in `training.plan`; ``"after-batch"`` is RollArt's order.
    more_groups, more_members
        Redundancy: groups and members in excess of what a batch needs; the last ones are cancelled.
    keep_losers
        Redundant groups are not cancelled: they join a later batch while the bound allows it.
    keep_kv, order
        As in `core.run_description`.
    """

    mode: Mode = "async"
    groups: int = 8
    members: int = 8
    alpha: int = 1
    depth: int | None = None
    staleness: StalenessMode = "cancel"
    checks: Literal["turns", "start"] = "turns"
    switch: SwitchOrder = "before-batch"
    more_groups: int = 0
    more_members: int = 0
    keep_losers: bool = False
    keep_kv: bool = False
    order: UpdateOrder = "all-at-once"

    def __post_init__(self) -> None:
        if min(self.groups, self.members) < 1 or min(self.more_groups, self.more_members) < 0:
            raise BadInput("training rules: at least one group and one member, and no negative redundancy")
        self.plan(1)

    @property
    def batch_trajectories(self) -> int:
        """Trajectories that one training step takes."""
        return self.groups * self.members

    @property
    def run(self) -> RunDescription:
        """The run as the controller is told of it; with ``checks="start"`` it knows of no bound."""
        weights = WeightUpdatePolicy(order=self.order, keep_kv=self.keep_kv)
        bounded = self.mode == "async" and self.checks == "turns"
        return RunDescription(staleness=self.bound if bounded else None, weights=weights)

    @property
    def bound(self) -> StalenessBound:
        """The bound of an asynchronous run."""
        running = (self.groups + self.more_groups) * (self.members + self.more_members)
        more = running - self.batch_trajectories
        return StalenessBound(self.alpha, self.staleness, self.batch_trajectories, more)

    @property
    def batch_rule(self) -> BatchRule:
        """How the sample buffer forms batches; no age is too old where the controller knows of no bound."""
        bound = self.run.staleness or StalenessBound(_UNBOUNDED, "cancel", self.batch_trajectories)
        return BatchRule(self.groups, bound, waits_for_oldest=not (self.more_groups or self.more_members))

    def plan(self, steps: int) -> TrainingPlan:
        """The order of a run of so many training steps."""
        if self.mode != "async":
            return plan_of_mode(self.mode, steps)
        return plan_of_mode("async", steps, alpha=self.alpha, depth=self.depth, switch=self.switch)
