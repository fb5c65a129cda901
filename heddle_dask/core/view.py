"""What a strategy may see, and what kinds of strategies there are.

A strategy proposes; `guards` refuse what would break the cluster. It is handed a `ClusterView` and reads;
it never writes. A strategy with memory keeps it in its own fields: replay gives it the same questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from heddle_dask.core.ids import ActionId, EngineId, HostId, TrajectoryId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.state import Action, Engine, Host, State, Trajectory


class ClusterView:
    """Read access to the controller's state."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def ready_engines(self) -> Sequence[Engine]:
        """Engines that take steps, in the order in which they joined."""
        return self._state.ready_engines

    def engine(self, engine_id: EngineId) -> Engine:
        """The engine of that id, ready or not."""
        return self._state.engines[engine_id]

    def trajectory(self, trajectory_id: TrajectoryId) -> Trajectory:
        """The trajectory of that id."""
        return self._state.trajectories[trajectory_id]

    @property
    def hosts(self) -> Iterable[Host]:
        """Hosts for actions, in the order in which they joined."""
        return self._state.hosts.values()

    @property
    def waiting_actions(self) -> Iterable[Action]:
        """Actions that wait for CPUs, oldest first."""
        return (self._state.actions[i] for i in self._state.waiting_actions)

    @property
    def unadmitted(self) -> Iterable[Trajectory]:
        """Trajectories that wait for admission, oldest first."""
        return (self._state.trajectories[i] for i in self._state.unadmitted)

    @property
    def alive(self) -> int:
        """Admitted trajectories that have not ended."""
        return self._state.alive


class Placement(Protocol):
    """Where a step runs."""

    def choose_engine(
        self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]
    ) -> Engine | None:
        """One of `candidates` (ready engines that can hold the step; never empty), or None to wait."""


class Scheduling(Protocol):
    """In which order the steps of one engine run."""

    def priority(self, trajectory: Trajectory, step: StepRequest, order: int) -> float:
        """Larger runs first. `order` is the running number of the request."""


class Admission(Protocol):
    """How many trajectories are alive."""

    def admit(self, view: ClusterView) -> Sequence[Trajectory]:
        """Those of `view.unadmitted` that may start now."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Proposal: run this action on this host with this many CPUs."""

    action_id: ActionId
    host_id: HostId
    cpus: int


class ActionAllocation(Protocol):
    """Which waiting actions start where, and with how many CPUs."""

    def allocate(self, view: ClusterView) -> Sequence[Grant]:
        """Actions to start now, each on a host with room for it."""


@dataclass(slots=True)
class StrategySet:
    """One strategy of each kind: what a preset builds."""

    placement: Placement
    scheduling: Scheduling
    admission: Admission
    actions: ActionAllocation
