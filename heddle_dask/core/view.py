"""What a strategy may see, and what kinds of strategies there are.

A strategy proposes; `guards` refuse what would break the cluster. It is handed a `ClusterView` and reads;
it never writes. A strategy with memory keeps it in its own fields: replay gives it the same questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from heddle_dask.core.entities import Action, Engine, Host, Trajectory
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, TrajectoryId
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.priority import Priority
from heddle_dask.core.state import State
from heddle_dask.core.tool_seconds import ToolSeconds


class ClusterView:
    """Read access to the controller's state."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def at(self) -> float:
        """When the event was that is being handled."""
        return self._state.at

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

    def residents(self, engine: Engine) -> list[Trajectory]:
        """The trajectories whose home the engine is, in the order of `Engine.residents`."""
        trajectories = self._state.trajectories
        return [trajectories[name] for name in engine.residents]

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
    def waiting(self) -> int:
        """How many wait for admission."""
        return len(self._state.unadmitted)

    @property
    def freed(self) -> Iterable[EngineId]:
        """Engines where a step has ended, or that a trajectory has left, since admission was asked last."""
        return self._state.freed

    def touched_since(self, number: int) -> tuple[list[EngineId], int]:
        """Engines whose residents have changed, or what is known of them, after that number; and the next number.

        From 0 on; a strategy that keeps sums over engines counts only these anew.
        """
        return self._state.touched_since(number)

    @property
    def unfinished_by_group(self) -> Mapping[GroupId, int]:
        """How many members of each group have not ended."""
        return self._state.unfinished_by_group

    @property
    def sampled_tokens(self) -> int:
        """Tokens generated so far, by all trajectories."""
        return self._state.sampled_tokens

    @property
    def observed_tokens(self) -> int:
        """Tokens added between steps so far, by tools and templates."""
        return self._state.observed_tokens

    @property
    def observed_per_token(self) -> float | None:
        """Tokens that tools add for each one generated, as the predictor knows it; None: unknown."""
        return self._state.observed_per_token

    @property
    def evictions(self) -> int:
        """Answers so far to contexts that their engines had had and have computed anew."""
        return self._state.evictions

    @property
    def tool_seconds(self) -> ToolSeconds:
        """How long the tools of all trajectories have taken, by label."""
        return self._state.tool_seconds

    @property
    def expected_tokens(self) -> int:
        """What all that are alive were predicted to generate after their last steps."""
        return self._state.expected_tokens

    @property
    def alive(self) -> int:
        """Admitted trajectories that have not ended."""
        return self._state.alive

    def reserved(self, engine: Engine) -> list[Trajectory]:
        """Trajectories admitted to this engine whose first step is not placed yet, in the order of their admission."""
        trajectories = self._state.trajectories
        return [trajectories[name] for name in engine.reserved]

    @property
    def reservations(self) -> int:
        """How many admitted trajectories wait for their first step on an engine that keeps room for them."""
        return self._state.reservations


class Placement(Protocol):
    """Where a step runs."""

    def choose_engine(
        self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]
    ) -> Engine | None:
        """One of `candidates` (ready engines that can hold the step; never empty), or None to wait."""


@runtime_checkable
class PlansBatches(Protocol):
    """A placement that wants to see a batch as a whole before its first step."""

    def plan(self, trajectories: Sequence[Trajectory], engines: Sequence[Engine]) -> None:
        """Trajectories without a home, and the ready engines."""


class Scheduling(Protocol):
    """In which order the steps of one engine run."""

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """Larger runs first. `order` is the running number of the request."""


class Preemption(Protocol):
    """Whether a step that has to wait for a slot stops one that runs."""

    def victim(self, waiting: Trajectory, running: Sequence[Trajectory]) -> Trajectory | None:
        """One of `running` that is to make room for `waiting` on its engine, or None.

        `running` are those that generate there and may be stopped, as they started; never empty.
        """


@dataclass(frozen=True, slots=True)
class Move:
    """Proposal: let the trajectory live on another engine.

    Attributes
    ----------
    kind
        ``"transfer"`` (copy the KV cache) or ``"recompute"`` (prefill it on the target).
    gain_s
        Seconds that its end is expected to come earlier.
    may_wait
        Whether it may begin later when another move has one of its engines now; else it is off then.
    """

    target_engine_id: EngineId
    kind: str
    gain_s: float = 0.0
    may_wait: bool = True


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """A move that was proposed, and that waits for its two ends or runs.

    Attributes
    ----------
    length_tokens
        Predicted tokens that the trajectory has still to generate, what the order goes by.
    order
        Running number of the request: earlier first among equals.
    """

    trajectory_id: TrajectoryId
    source: EngineId
    target: EngineId
    kind: str
    length_tokens: float
    order: int


class Migration(Protocol):
    """Whether a trajectory is to go on elsewhere, asked after each prediction while no step of it runs."""

    def propose(self, view: ClusterView, trajectory: Trajectory) -> Move | None:
        """A move to another ready engine, or None to stay."""

    def choose(self, waiting: Sequence[MoveRequest], running: Sequence[MoveRequest]) -> Sequence[MoveRequest]:
        """Those of `waiting` that start now; moves that run at once must not share an engine.

        `waiting` are those that share no engine with any of `running`; never empty.
        """


@runtime_checkable
class ForgetsTrajectories(Protocol):
    """A migration that keeps something of each trajectory and is to drop it at its end."""

    def forget(self, trajectory: Trajectory) -> None:
        """The trajectory has ended; it may never have been asked about."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Proposal: let this trajectory start.

    Attributes
    ----------
    engine_id
        Where its first step should be placed; None leaves that to the placement.
    reserved_tokens
        KV tokens that the engine keeps for it until then.
    """

    trajectory: Trajectory
    engine_id: EngineId | None = None
    reserved_tokens: float = 0.0


class Admission(Protocol):
    """Which waiting trajectories start, and where."""

    def admit(self, view: ClusterView) -> Iterable[Admit]:
        """Those of `view.unadmitted` that may start now.

        May be a generator: each proposal is carried out before the next one is asked for, so that the view shows its
        reservation.
        """


@runtime_checkable
class RanksWaiting(Protocol):
    """An admission that lets trajectories in by what is predicted of them."""

    def rank(self, trajectory: Trajectory) -> None:
        """A submitted trajectory has its (newest) prediction; or there is no predictor, and it was submitted."""


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


@dataclass(frozen=True, slots=True)
class PredictorChoice:
    """Which predictor the body is to run; the brain knows its answers only."""

    name: str
    options: Mapping[str, Any]


@dataclass(slots=True)
class StrategySet:
    """One strategy of each kind: what a preset builds."""

    placement: Placement
    scheduling: Scheduling
    admission: Admission
    actions: ActionAllocation
    preemption: Preemption | None = None
    migration: Migration | None = None
    predictor: PredictorChoice | None = None
