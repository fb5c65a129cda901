"""The kinds of strategies, and the view of the cluster that they get.

A strategy proposes; `guards` refuse invalid proposals. A strategy only reads the `ClusterView`. Its memory is in its
own fields: a replay makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from heddle_dask.core.action_times import ToolSeconds
from heddle_dask.core.entities import Action, Engine, Host, Trajectory
from heddle_dask.core.events import StepFinished
from heddle_dask.core.gpu_chunks import FreeChunks, chunk_size
from heddle_dask.core.ids import ActionId, EngineId, GroupId, HostId, RunId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, Priority, StepRequest
from heddle_dask.core.resources import Resources
from heddle_dask.core.service_copies import ChunkRank, ranked_chunks
from heddle_dask.core.state import State
from heddle_dask.core.waiting_actions import actions_in_turn, run_of_action, turn_cost


class ClusterView:
    """Read-only access to the controller's state."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def at(self) -> float:
        """Time of the event that is being handled."""
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
        """The trajectories with this home, in the order of `Engine.residents`."""
        trajectories = self._state.trajectories
        return [trajectories[name] for name in engine.residents]

    @property
    def hosts(self) -> Iterable[Host]:
        """Hosts that take actions, in the order in which they joined."""
        return (host for host in self._state.hosts.values() if not host.draining)

    @property
    def waiting_actions(self) -> Iterable[Action]:
        """Actions that wait for resources, oldest first; where runs share the cluster, they take turns."""
        waiting = (self._state.actions[i] for i in self._state.waiting_actions)
        return actions_in_turn(self._state, waiting) if self._state.is_shared else waiting

    def run_of(self, action: Action) -> str:
        """The run of a waiting action; empty while only one run is open."""
        return run_of_action(self._state, action) if self._state.is_shared else ""

    def turn_of(self, run: str) -> float:
        """The turn of a run (`core.fair_share`): the smallest goes first."""
        return self._state.fair.turn(RunId(run)) if run else 0.0

    def turn_cost(self, action: Action) -> float:
        """By how much the turn of its run grows when this action starts with the least of everything."""
        return turn_cost(self._state, action) if self._state.is_shared else 0.0

    def is_waiting(self, action: Action) -> bool:
        """Whether it waits for an allocation: not for a place for its sandbox, and not for its next attempt."""
        return action.spec.action_id in self._state.waiting_actions

    @property
    def new_actions(self) -> Iterable[Action]:
        """Actions that have begun to wait since the last allocation, in the order of their requests.

        An action of a lost host waits again; its `number` is smaller than those of later requests.
        """
        actions = self._state.actions
        return (actions[i] for i in self._state.new_actions)

    @property
    def freed_hosts(self) -> Iterable[HostId]:
        """Hosts that have joined, or on which an action has ended, since the last allocation."""
        return self._state.freed_hosts

    @property
    def host_changes(self) -> int:
        """Number of times that a host has joined, has begun to drain or was lost."""
        return self._state.host_changes

    def action(self, action_id: ActionId) -> Action | None:
        """The action of that id; None when it has ended."""
        return self._state.actions.get(action_id)

    def host(self, host_id: HostId) -> Host | None:
        """The host of that id, draining or not; None when it is lost."""
        return self._state.hosts.get(host_id)

    def api_free(self, name: str) -> int | None:
        """Calls of this API that may start now by its quota; None: no limit."""
        return self._state.apis.free(name, self._state.at)

    def free_chunks(self, host: Host) -> FreeChunks:
        """The free GPU chunks of this host; chunks with cached copies of services are free."""
        return host.gpus.buddies.counts()

    def chunk_rank(self, host: Host, service: str, gpus: int) -> ChunkRank | None:
        """How good the best free chunk of this host is for this service; smaller is better, and None: none is free.

        A chunk on which the service is resident comes first, then memory that is empty, then the least recently used.
        """
        ranked = ranked_chunks(host.gpus, service, chunk_size(gpus))
        return ranked[0][0] if ranked else None

    def load_s(self, host: Host, service: str, gpus: int) -> float | None:
        """Expected seconds until the service can run on a free chunk of this host; None when nothing is known."""
        rank = self.chunk_rank(host, service, gpus)
        if rank is not None and rank[0] == 0:
            return 0.0
        cold = (service, gpus) not in host.gpus.kept
        return self._state.load_seconds.expected(self._state.services[service], gpus, cold)

    def host_fixed(self, action: Action) -> HostId | None:
        """The only host on which this action can run, because its state is there; None: any of its pool."""
        return action.host_fixed

    @property
    def unadmitted(self) -> Iterable[Trajectory]:
        """Trajectories that wait for admission, oldest first."""
        return (self._state.trajectories[i] for i in self._state.unadmitted)

    @property
    def waiting(self) -> int:
        """Number of trajectories that wait for admission."""
        return len(self._state.unadmitted)

    @property
    def freed(self) -> Iterable[EngineId]:
        """Engines with less load since the last call of the admission."""
        return self._state.freed

    def touched_since(self, number: int) -> tuple[list[EngineId], int]:
        """Engines with changed residents, contexts or predictions after that number, and the number for the next call.

        Start with 0. A strategy with sums over engines recomputes only these.
        """
        return self._state.touched_since(number)

    @property
    def unfinished_by_group(self) -> Mapping[GroupId, int]:
        """Number of members of each group that have not ended."""
        return self._state.unfinished_by_group

    @property
    def sampled_tokens(self) -> int:
        """Tokens generated so far by all trajectories."""
        return self._state.sampled_tokens

    @property
    def observed_tokens(self) -> int:
        """Tokens added between steps so far by tools and templates."""
        return self._state.observed_tokens

    @property
    def observed_per_token(self) -> float | None:
        """Observation tokens per generated token, from the predictor of the run; None when unknown."""
        return None

    @property
    def evictions(self) -> int:
        """Number of results so far for which the engine recomputed an evicted context."""
        return self._state.evictions

    @property
    def tool_seconds(self) -> ToolSeconds:
        """Seconds of the finished tool calls of all trajectories, by label."""
        return self._state.tool_seconds

    @property
    def expected_tokens(self) -> int:
        """Sum of `Trajectory.expected_tokens` over all live trajectories."""
        return self._state.expected_tokens

    @property
    def alive(self) -> int:
        """Admitted trajectories that have not ended."""
        return self._state.alive

    def reserved(self, engine: Engine) -> list[Trajectory]:
        """Trajectories with a reservation on this engine, in the order of their admission."""
        trajectories = self._state.trajectories
        return [trajectories[name] for name in engine.reserved]

    def queued(self, engine: Engine) -> int:
        """Steps that run on this engine or precede a further one: those of other runs that are held back do not."""
        return len(engine.inflight)

    def is_own(self, trajectory: Trajectory) -> bool:
        """Whether the trajectory is of the run that looks."""
        return True

    @property
    def homeless(self) -> list[Trajectory]:
        """Live trajectories on no engine and without a reservation: theirs was lost, or they have not been placed."""
        return [t for t in self._state.trajectories.values() if t.is_homeless]

    @property
    def reservations(self) -> int:
        """Number of trajectories with a reservation on an engine."""
        return self._state.reservations


class Placement(Protocol):
    """Chooses the engine of a step."""

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine | None:
        """One of `candidates` (ready engines that can hold the step; never empty), or None to wait."""


@runtime_checkable
class PlansBatches(Protocol):
    """A placement that plans a whole batch before its first step."""

    def plan(self, trajectories: Sequence[Trajectory], engines: Sequence[Engine]) -> None:
        """Plan `trajectories`, which have no home, on the ready `engines`."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where the next step of a trajectory may run, and how.

    Attributes
    ----------
    engines
        Never empty; the placement chooses among them.
    prefill_only
        The engine computes the prompt and one token; then the step is routed again.
    with_kv
        The KV cache is transferred to the chosen engine before the step starts there, if it is elsewhere.
    """

    engines: Sequence[Engine]
    prefill_only: bool = False
    with_kv: bool = False


class Affinity(Protocol):
    """Restricts the engines of a step before the placement chooses, for example to one class of hardware."""

    def route(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Route:
        """Where the step may run: some of `candidates`, which are ready and never empty."""

    def may_move(self, trajectory: Trajectory, target: Engine) -> bool:
        """Whether a migration may move the trajectory to this ready engine."""


@runtime_checkable
class ObservesSteps(Protocol):
    """An affinity that learns from the answers of engines."""

    def step_answered(self, trajectory: Trajectory, answer: StepFinished) -> None:
        """Called for every answer, parts of steps included, after the trajectory has counted it."""


class Scheduling(Protocol):
    """Orders the steps of one engine."""

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """Priority of the step; larger runs first. `order` is smaller for a step placed earlier."""


class Preemption(Protocol):
    """Decides whether a step that has to wait for a slot preempts a running one."""

    def victim(self, waiting: Trajectory, running: Sequence[Trajectory]) -> Trajectory | None:
        """The trajectory of `running` to preempt for `waiting` on its engine, or None.

        `running` are the trajectories that generate there and may be preempted, in the order of their start; never
        empty.
        """


@dataclass(frozen=True, slots=True)
class Move:
    """Proposal: move the trajectory to another engine.

    Attributes
    ----------
    kind
        ``"transfer"`` (copy the KV cache) or ``"recompute"`` (prefill it on the target).
    gain_s
        Seconds by which the trajectory is expected to end earlier.
    may_wait
        Whether the move may start later if another move occupies one of its engines now; otherwise it is dropped.
    """

    target_engine_id: EngineId
    kind: str
    gain_s: float = 0.0
    may_wait: bool = True


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """A proposed move that waits for its two engines or runs.

    Attributes
    ----------
    length_tokens
        Predicted remaining tokens of the trajectory, for the order of moves.
    order
        Running number of the request; breaks ties, smaller first.
    for_step
        Whether a step waits for it (`Route.with_kv`): it starts as soon as both engines are free, before the moves that
        the strategy chooses.
    """

    trajectory_id: TrajectoryId
    source: EngineId
    target: EngineId
    kind: str
    length_tokens: float
    order: int
    for_step: bool = False


class Migration(Protocol):
    """Decides whether a trajectory moves to another engine; called after each prediction while no step of it runs."""

    def propose(self, view: ClusterView, trajectory: Trajectory) -> Move | None:
        """A move to another ready engine, or None to stay."""

    def choose(self, waiting: Sequence[MoveRequest], running: Sequence[MoveRequest]) -> Sequence[MoveRequest]:
        """The moves of `waiting` that start now; concurrent moves must not share an engine.

        `waiting` contains the moves that share no engine with any of `running`; never empty.
        """


@runtime_checkable
class ForgetsTrajectories(Protocol):
    """A strategy with data per trajectory, to be dropped at its end, or one that learns from the end."""

    def forget(self, trajectory: Trajectory) -> None:
        """The trajectory, which may be unknown to the strategy, has ended. Keep nothing of it but what was learned."""


class Stealing(Protocol):
    """Decides which steps an engine with free slots takes from another one, where their contexts are."""

    def take(
        self, view: ClusterView, idle: Engine, loaded: Engine, queue: Sequence[Trajectory], most: int
    ) -> Sequence[Trajectory]:
        """At most `most` trajectories of `queue`, which wait for a slot of `loaded`, the first to run first."""

    def prefers(self, trajectory: Trajectory, home: Engine, idle: Engine) -> bool:
        """Whether `idle` takes the new step of a trajectory that the placement leaves at its home."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Proposal: admit this trajectory.

    Attributes
    ----------
    engine_id
        Engine with a reservation until the first step is placed. It is a proposal for that step: the placement decides.
        None: no reservation.
    reserved_tokens
        KV tokens to reserve on that engine.
    """

    trajectory: Trajectory
    engine_id: EngineId | None = None
    reserved_tokens: float = 0.0


class Admission(Protocol):
    """Decides which waiting trajectories start, and on which engine."""

    def admit(self, view: ClusterView) -> Iterable[Admit]:
        """The trajectories of `view.unadmitted` that start now.

        May be a generator: each proposal is carried out before the next one is requested, so the view contains its
        reservation.
        """


@runtime_checkable
class RanksWaiting(Protocol):
    """An admission that orders waiting trajectories by their predictions."""

    def rank(self, trajectory: Trajectory) -> None:
        """Called for a submitted trajectory at each new prediction, or at its submission without a predictor."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Proposal: run this action on this host with these resources.

    Attributes
    ----------
    reach_cpus
        CPUs of its host that it may use in all, its own among them: the others while they are idle. 0: its own alone.
    nice
        With what priority it uses them (``RunAction.nice``).
    """

    action_id: ActionId
    host_id: HostId
    resources: Resources
    reach_cpus: int = 0
    nice: int = 0


class ActionAllocation(Protocol):
    """Decides which waiting actions start, on which host, and with which resources."""

    def allocate(self, view: ClusterView) -> Sequence[Grant]:
        """Actions to start now, each on a host with enough free resources."""


@runtime_checkable
class GathersEvents(Protocol):
    """An allocation of actions that decides once for all events of one moment."""

    def pass_delay_s(self, view: ClusterView) -> float | None:
        """Seconds until the next allocation, which then sees what arrives and ends meanwhile; None: allocate now.

        With 0 the events that are already on their way come first.
        """


@dataclass(frozen=True, slots=True)
class EndedAction:
    """An action that has run.

    Attributes
    ----------
    cause
        As `ActionFinished.cause`; empty: ok.
    """

    request: ActionRequest
    resources: Resources
    run_s: float
    ok: bool
    cause: str = ""

    @property
    def units(self) -> int:
        """Its amount of the elastic resource; 0 without one."""
        elastic = self.request.demand.elastic
        return 0 if elastic is None else self.resources[elastic]


@runtime_checkable
class ObservesActions(Protocol):
    """An allocation of actions that learns from those that have ended."""

    def action_ended(self, ended: EndedAction) -> None:
        """Called for each action that has run, failed ones included, before the next allocation."""


@dataclass(frozen=True, slots=True)
class PredictorChoice:
    """The predictor that the body runs, with its options; the controller gets its predictions only."""

    name: str
    options: Mapping[str, Any]


@dataclass(slots=True)
class StrategySet:
    """One strategy of each kind, as built by a preset."""

    placement: Placement
    scheduling: Scheduling
    admission: Admission
    actions: ActionAllocation
    preemption: Preemption | None = None
    migration: Migration | None = None
    predictor: PredictorChoice | None = None
    affinity: Affinity | None = None
    stealing: Stealing | None = None
