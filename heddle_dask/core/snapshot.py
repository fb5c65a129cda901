"""A frozen view of the cluster at one moment, for progress, summaries, timelines and training; no decision reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId, HostId, PolicyVersion, RunId
from heddle_dask.core.migrations import MoveTotals
from heddle_dask.core.resources import ModelService
from heddle_dask.core.state import State
from heddle_dask.core.transitions import ActionState, CopyState, EngineState, TrajectoryState


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """The weights of one engine at one moment.

    Attributes
    ----------
    installed, target
        The version that it samples with, and the one that it is about to get (None: none).
    state, cause
        A `WeightsState` by value, and why the latest fetch or installation failed (empty: it did not).
    """

    engine_id: EngineId
    installed: PolicyVersion
    target: PolicyVersion | None
    state: str
    cause: str


@dataclass(frozen=True, slots=True)
class StalenessCounts:
    """The account of one run with a bound at one moment.

    Attributes
    ----------
    optimizer_steps
        n.
    credits, accepted, running
        As in `StalenessBound.credits`.
    without_credit
        Submitted trajectories that wait for a credit.
    ages
        Running trajectories that have begun, by n - b; those of another line of training under -1.
    """

    optimizer_steps: int
    credits: int
    accepted: int
    running: int
    without_credit: int
    cancelled: dict[str, int] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)


def engine_versions(state: State) -> tuple[EngineVersion, ...]:
    """The weights of the engines that take steps, or will once they have newer weights; in the order of joining."""
    return tuple(
        EngineVersion(
            engine.engine_id,
            engine.weights.installed,
            engine.weights.target,
            engine.weights.state.value,
            engine.weights.cause,
        )
        for engine in state.engines.values()
        if engine.state in (EngineState.READY, EngineState.LOADING)
    )


def staleness_counts(state: State, run_id: RunId) -> StalenessCounts | None:
    """The account of one run; None without a bound. O(trajectories)."""
    run = state.runs.get(run_id)
    if run is None or run.ledger is None:
        return None
    ages: Counter[int] = Counter()
    for trajectory in state.trajectories.values():
        first = trajectory.first_version
        alive = trajectory.spec.run_id == run_id and trajectory.state is not TrajectoryState.ENDED
        if alive and first is not None and trajectory.parent is None and not trajectory.cancelled:
            age = run.ledger.age(first)
            ages[-1 if age is None else max(0, age)] += 1
    return StalenessCounts(
        run.ledger.version.number,
        run.ledger.credits,
        run.ledger.accepted,
        run.ledger.running,
        len(run.without_credit),
        dict(run.cancelled),
        dict(sorted(ages.items())),
    )


def training_counts(state: State, run_id: RunId) -> dict[str, Any]:
    """JSON-able: versions of the engines in use and the account of the run; empty where nothing is trained."""
    counts: dict[str, Any] = {}
    if state.weights.published is not None:
        ready = [engine for engine in state.engines.values() if engine.state is EngineState.READY]
        counts["versions"] = dict(sorted(Counter(str(engine.version) for engine in ready).items()))
        counts["published"] = str(state.weights.published)
    account = staleness_counts(state, run_id)
    if account is not None:
        counts["staleness"] = {
            "optimizer_steps": account.optimizer_steps,
            "credits": account.credits,
            "accepted": account.accepted,
            "running": account.running,
            "without_credit": account.without_credit,
            "cancelled": account.cancelled,
            "ages": {str(age): count for age, count in account.ages.items()},
        }
    return counts


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """One engine at one moment.

    Attributes
    ----------
    generating, queued
        Steps that have started, and steps that were sent and have not started.
    resident_tokens
        Context tokens of all trajectories with this home.
    kv_capacity_tokens
        KV capacity in tokens; 0 when unknown.
    """

    engine_id: EngineId
    state: EngineState
    slots: int
    generating: int
    queued: int
    resident_tokens: int
    kv_capacity_tokens: int
    version: PolicyVersion = field(default_factory=PolicyVersion)

    @classmethod
    def of(cls, engine: Engine) -> EngineCounts:
        spec, generating = engine.spec, engine.generating
        return cls(
            spec.engine_id,
            engine.state,
            spec.slots,
            generating,
            len(engine.inflight) - generating,
            engine.resident_tokens,
            spec.kv_capacity_tokens,
            engine.version,
        )


@dataclass(frozen=True, slots=True)
class HostCounts:
    """One host of actions at one moment: its CPUs, its free CPUs, and its running actions."""

    host_id: HostId
    cpus: int
    free_cpus: int
    running: int


@dataclass(frozen=True, slots=True)
class ServiceCounts:
    """One model service at one moment.

    Attributes
    ----------
    waiting, running
        Requests that have not started, those that wait for a load included; and requests that run.
    resident, loading
        Copies on GPUs, and copies that are being loaded or wait for memory.
    hosts
        Hosts of its pool that take actions: with none, its requests wait for one.
    """

    name: str
    waiting: int
    running: int
    resident: int
    loading: int
    hosts: int

    @classmethod
    def of(cls, state: State, service: ModelService) -> ServiceCounts:
        copies = list(state.copies_of.get(service.name, {}).values())
        loading = sum(copy.state in (CopyState.CLEARING, CopyState.LOADING) for copy in copies)
        return cls(
            service.name,
            len(state.service_queues.get(service.name, ())) + sum(len(copy.waiting) for copy in copies),
            sum(len(copy.running) for copy in copies),
            sum(copy.state is CopyState.RESIDENT for copy in copies),
            loading,
            sum(h.spec.pool == service.pool and not h.draining for h in state.hosts.values()),
        )


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The controller's view of its cluster at one moment.

    Attributes
    ----------
    trajectories
        Number of trajectories in each state, without ended ones.
    alive
        Trajectories that are admitted and have not ended.
    steps_waiting
        Steps that have not been sent to an engine.
    actions_waiting
        Actions that wait for resources.
    actions_without_worker
        Those of them that no present worker could run even when empty.
    engines
        All engines that have joined, lost ones included, in the order of joining.
    moves
        Totals of the moves by kind (`core.migrations.MoveTotals`).
    sampled_tokens
        Tokens generated by all trajectories, ended ones included.
    services
        The declared model services, in the order of their declaration.
    """

    at_s: float
    trajectories: Mapping[TrajectoryState, int]
    alive: int
    steps_waiting: int
    actions_waiting: int
    engines: tuple[EngineCounts, ...]
    hosts: tuple[HostCounts, ...]
    moves: Mapping[str, Mapping[str, float]]
    stale_events: int
    sampled_tokens: int
    services: tuple[ServiceCounts, ...] = ()
    actions_without_worker: int = 0

    @property
    def ready_engines(self) -> tuple[EngineCounts, ...]:
        return tuple(engine for engine in self.engines if engine.state is EngineState.READY)

    def counts(self) -> dict[str, Any]:
        """JSON-able totals for a driver's display; steps that wait for an engine count as queued."""
        ready = self.ready_engines
        counts: dict[str, Any] = {
            "alive": self.alive,
            "not_admitted": sum(self.trajectories.values()) - self.alive,
            "generating": sum(engine.generating for engine in ready),
            "next": sum(
                max(0, engine.generating - engine.slots) for engine in ready
            ),  # of them: in the engines' own queues
            "queued": sum(engine.queued for engine in ready) + self.steps_waiting,
            "acting": sum(host.running for host in self.hosts),
            "actions_waiting": self.actions_waiting,
            "actions_without_worker": self.actions_without_worker,
            "engines_ready": len(ready),
            "slots": sum(engine.slots for engine in ready),
            "tool_cpus": sum(host.cpus for host in self.hosts),
            "late_arrivals": self.stale_events,
            "moves": self.moves,
        }
        if self.services:
            counts["services"] = {service.name: asdict(service) for service in self.services}
        return counts


def run_counts(state: State, moves: Mapping[str, MoveTotals], run_id: RunId) -> dict[str, Any]:
    """The totals of one run for its driver's display; of engines, tool CPUs and moves those of the cluster.

    O(trajectories + engines + hosts).
    """
    counts = {**snapshot_of(state, moves).counts(), **training_counts(state, run_id)}
    if not state.is_shared or run_id not in state.runs:
        return counts
    run, mine = state.runs[run_id], [t for t in state.trajectories.values() if t.spec.run_id == run_id]
    by_state = Counter(t.state for t in mine)
    names = {t.trajectory_id for t in mine}
    actions = [a.state for a in state.actions.values() if a.spec.trajectory_id in names]
    return {
        **counts,
        "alive": run.alive,
        "not_admitted": len(run.unadmitted) + len(run.without_credit),
        "generating": by_state[TrajectoryState.GENERATING],
        "next": sum(name in names for engine in state.engines.values() for name in engine.ahead),
        "queued": by_state[TrajectoryState.QUEUED] + by_state[TrajectoryState.WAITING],
        "acting": actions.count(ActionState.RUNNING),
        "actions_waiting": actions.count(ActionState.WAITING),
        "runs": len(state.runs),
    }


def snapshot_of(state: State, moves: Mapping[str, MoveTotals]) -> ClusterSnapshot:
    """Count the state of a controller; O(trajectories + engines + hosts)."""
    return ClusterSnapshot(
        at_s=state.at,
        trajectories=Counter(trajectory.state for trajectory in state.trajectories.values()),
        alive=state.alive,
        steps_waiting=len(state.waiting_steps),
        actions_waiting=len(state.waiting_actions) + len(state.unplaced_actions),
        engines=tuple(EngineCounts.of(engine) for engine in state.engines.values()),
        hosts=tuple(
            HostCounts(host.spec.host_id, host.spec.cpus, host.free_cpus, len(host.running))
            for host in state.hosts.values()
        ),
        moves={kind: asdict(totals) for kind, totals in moves.items()},
        stale_events=state.stale_events,
        sampled_tokens=state.sampled_tokens,
        services=tuple(ServiceCounts.of(state, service) for service in state.services.values()),
        actions_without_worker=len(state.stranded),
    )
