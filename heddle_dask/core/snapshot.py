"""A frozen view of the cluster at one moment, for progress, summaries and timelines; no decision reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from heddle_dask.core.entities import Engine
from heddle_dask.core.ids import EngineId, HostId
from heddle_dask.core.migrations import MoveTotals
from heddle_dask.core.state import State
from heddle_dask.core.transitions import EngineState, TrajectoryState


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """One engine at one moment.

    Attributes
    ----------
    generating, queued
        Steps that have started, and those that were sent and have not.
    resident_tokens
        Context tokens of all trajectories at home there.
    kv_capacity_tokens
        Tokens that its KV cache holds; 0 where unknown.
    """

    engine_id: EngineId
    state: EngineState
    slots: int
    generating: int
    queued: int
    resident_tokens: int
    kv_capacity_tokens: int

    @classmethod
    def of(cls, engine: Engine) -> EngineCounts:
        """Count one engine of a state."""
        spec, generating = engine.spec, engine.generating
        return cls(
            spec.engine_id,
            engine.state,
            spec.slots,
            generating,
            len(engine.inflight) - generating,
            engine.resident_tokens,
            spec.kv_capacity_tokens,
        )


@dataclass(frozen=True, slots=True)
class HostCounts:
    """One host of actions at one moment: its CPUs, those that are free, and how many actions run there."""

    host_id: HostId
    cpus: int
    free_cpus: int
    running: int


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """What a controller knows of its cluster at one moment.

    Attributes
    ----------
    at_s
        When the latest event was.
    trajectories
        How many are in each state; those that have ended are forgotten.
    alive
        Those that are admitted and have not ended.
    steps_waiting
        Steps that no engine has been sent yet.
    actions_waiting
        Actions that wait for CPUs.
    engines
        All that have joined, lost ones included, in the order in which they did.
    moves
        By kind: what the moves of contexts came to (`core.migrations.MoveTotals`).
    stale_events
        Events that were ignored because they came too late.
    sampled_tokens
        Tokens that all trajectories have generated, those that have ended included.
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

    @property
    def ready_engines(self) -> tuple[EngineCounts, ...]:
        """Engines that take steps."""
        return tuple(engine for engine in self.engines if engine.state is EngineState.READY)

    def counts(self) -> dict[str, Any]:
        """The sums that a driver shows, JSON-able; steps that wait for an engine count as queued."""
        ready = self.ready_engines
        return {
            "alive": self.alive,
            "generating": sum(engine.generating for engine in ready),
            "queued": sum(engine.queued for engine in ready) + self.steps_waiting,
            "acting": sum(host.running for host in self.hosts),
            "actions_waiting": self.actions_waiting,
            "engines_ready": len(ready),
            "slots": sum(engine.slots for engine in ready),
            "tool_cpus": sum(host.cpus for host in self.hosts),
            "late_arrivals": self.stale_events,
            "moves": self.moves,
        }


def snapshot_of(state: State, moves: Mapping[str, MoveTotals]) -> ClusterSnapshot:
    """Count the state of a controller; O(trajectories + engines + hosts)."""
    return ClusterSnapshot(
        at_s=state.at,
        trajectories=Counter(trajectory.state for trajectory in state.trajectories.values()),
        alive=state.alive,
        steps_waiting=len(state.waiting_steps),
        actions_waiting=len(state.waiting_actions),
        engines=tuple(EngineCounts.of(engine) for engine in state.engines.values()),
        hosts=tuple(
            HostCounts(host.spec.host_id, host.spec.cpus, host.free_cpus, len(host.running))
            for host in state.hosts.values()
        ),
        moves={kind: asdict(totals) for kind, totals in moves.items()},
        stale_events=state.late_arrivals,
        sampled_tokens=state.sampled_tokens,
    )
