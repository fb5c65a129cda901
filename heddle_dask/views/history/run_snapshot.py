"""One frozen picture of a run, from which the dashboard's page, the metrics and the terminal draw.

Times are seconds since the session began, unless a name says otherwise. Without prompts and tokens: ids, counts, times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from heddle_dask.views.history.reward_history import RewardView
from heddle_dask.views.history.run_shares import RunShare, title_of

SNAPSHOT_FORMAT = 1
"""Raised when a field changes its meaning."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine incarnation.

    Attributes
    ----------
    index
        Number in the order of joining, from 0; segments name engines by it.
    seat
        The lowest number that no living engine had when it joined: a name that a replacement takes over.
    state
        ``ready``, ``draining``, ``drained`` (empty, and about to leave) or ``lost``.
    generating, queued
        Steps that were sent to the engine's process, and steps that wait at its worker.
    resident_tokens, kv_capacity_tokens
        Context tokens of the trajectories that live here, and the KV memory in tokens; 0 when unknown.
    steps, generated_tokens
        Finished steps and their tokens so far.
    lost_s, lost_because
        When and why it was lost; None and empty while it is not.
    is_idle
        Whether it is ready and holds no trajectory, while steps wait for another engine.
    """

    index: int
    seat: int
    engine_id: str
    state: str
    tp_degree: int
    slots: int
    generating: int
    queued: int
    resident_tokens: int
    kv_capacity_tokens: int
    steps: int
    generated_tokens: int
    joined_s: float
    lost_s: float | None = None
    lost_because: str = ""
    is_idle: bool = False

    @property
    def kv_share(self) -> float | None:
        """Share of the KV memory that the residents' contexts take; may exceed 1. None when unknown."""
        return self.resident_tokens / self.kv_capacity_tokens if self.kv_capacity_tokens else None


@dataclass(frozen=True, slots=True)
class PoolView:
    """The hosts of one pool of actions: CPUs, and actions that run and wait there."""

    pool: str
    hosts: int
    cpus: int
    free_cpus: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class ActionView:
    """All calls of one tool or reward (`label`); other labels than the most frequent are one row, ``other``."""

    label: str
    kind: str
    waiting: int
    running: int
    finished: int
    failed: int
    run_s: float


@dataclass(frozen=True, slots=True)
class FailureView:
    """Failures of one cause.

    Attributes
    ----------
    boundary
        What failed: ``trajectory``, ``step``, ``action``, ``engine``, ``host``, ``move``.
    cause
        In words, numbers left out; ``other`` for all causes beyond the first hundred.
    message
        One line that the latest of them told; empty: none.
    """

    boundary: str
    cause: str
    count: int
    latest_s: float
    message: str = ""


@dataclass(frozen=True, slots=True)
class MoveView:
    """Moves of one kind (``transfer``, ``recompute``); `exposed_s`: seconds in which steps waited for them.

    `from_leaving` of those that started left an engine that drains or is lost: no decision of the strategy.
    """

    kind: str
    started: int
    from_leaving: int
    running: int
    failed: int
    tokens: int
    seconds: float
    exposed: int
    exposed_s: float


@dataclass(frozen=True, slots=True)
class LengthPair:
    """Tokens of a finished trajectory: as predicted before its first step and after it, and as they were.

    `after_step_tokens` is None if there was no prediction after the first step.
    """

    first_tokens: float
    first_q90_tokens: float
    after_step_tokens: float | None
    actual_tokens: int


@dataclass(frozen=True, slots=True)
class TrajectoryView:
    """One trajectory, with the latest part of its timeline.

    Attributes
    ----------
    phase
        Name of its phase (`phases.PHASES`); ``ended`` when it has ended.
    engine
        Index of the engine of its current step or its home; -1 without one.
    seconds
        Seconds in each phase so far, in the order of `phases.PHASES`.
    remaining_tokens
        Predicted tokens still to come, those generated since subtracted; None without a prediction.
    segment_starts_s, segment_phases, segment_engines
        The timeline as columns: segment i is of this phase, on this engine (-1: none), and ends where the next one
        starts; the last ends at `ended_s`, or now.
    """

    trajectory_id: str
    group_id: str
    domain: str
    parent: str
    phase: str
    engine: int
    submitted_s: float
    admitted_s: float | None
    ended_s: float | None
    status: str
    cause: str
    steps: int
    generated_tokens: int
    context_tokens: int
    remaining_tokens: float | None
    preemptions: int
    moves: int
    seconds: tuple[float, ...]
    segment_starts_s: tuple[float, ...]
    segment_phases: tuple[int, ...]
    segment_engines: tuple[int, ...]
    segments_omitted: int = 0


@dataclass(frozen=True, slots=True)
class EngineSeries:
    """One engine at the times of the run's series; zeros before it joined."""

    index: int
    generating: tuple[int, ...]
    queued: tuple[int, ...]
    resident_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunSeries:
    """Counts over time, at `at_s`. Samples are thinned as the run gets longer.

    Attributes
    ----------
    by_phase
        Live trajectories in each phase, in the order of `phases.PHASES`: by_phase[phase][sample].
    live
        Trajectories that are admitted and have not ended: the tail, when none is submitted any more.
    ended, steps, generated_tokens
        Totals up to that time.
    slots, resident_tokens, kv_capacity_tokens
        Sums over the engines that are ready or drain.
    engines
        The engines whose series are kept: the latest 64 at most.
    moves, preemptions
        Totals up to that time: moves that have started, and preempted steps.
    """

    at_s: tuple[float, ...]
    live: tuple[int, ...]
    ended: tuple[int, ...]
    steps: tuple[int, ...]
    generated_tokens: tuple[int, ...]
    by_phase: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]
    resident_tokens: tuple[int, ...]
    kv_capacity_tokens: tuple[int, ...]
    engines: tuple[EngineSeries, ...]
    moves: tuple[int, ...]
    preemptions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrainingPoint:
    """Figures of one training step, by the names of `metrics.jsonl`."""

    step: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrainingView:
    """Training on this cluster.

    Attributes
    ----------
    optimizer_steps
        Finished optimiser steps of the line of training `lineage`.
    published
        The newest version in the weight store, as text; empty before the first.
    engines_by_version
        Number of engines that sample with each version.
    updates, paused_mean_s, paused_max_s
        Installations of new weights on engines, and for how long an engine paused for one.
    points
        The latest training steps, oldest first.
    """

    lineage: str
    optimizer_steps: int
    published: str
    engines_by_version: Mapping[str, int]
    updates: int
    paused_mean_s: float
    paused_max_s: float
    points: tuple[TrainingPoint, ...]


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Totals of the session up to its latest event.

    Attributes
    ----------
    submitted, live, ended
        Trajectories announced so far; admitted and not ended; ended, by status.
    by_phase
        Trajectories that have not ended, by phase.
    steps_waiting
        Steps that no engine was chosen for yet.
    preemptions
        Steps that were stopped for more urgent ones.
    requeues
        Steps that went back to the queue for another reason: their engine drains or is lost, an idle engine takes
        them, or another run joins.
    phase_seconds
        Seconds of all trajectories in each phase, up to their latest change of phase.
    """

    submitted: int
    live: int
    ended: Mapping[str, int]
    by_phase: Mapping[str, int]
    steps_waiting: int
    steps: int
    generated_tokens: int
    cached_tokens: int
    prompt_tokens: int
    preemptions: int
    phase_seconds: Mapping[str, float]
    requeues: int = 0


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A picture of a cluster, and of the session on it if one is open.

    Attributes
    ----------
    session
        Id of the open session, or of the latest one; empty before the first.
    is_open
        Whether that session is open.
    journal_offset
        Number of events that the session had handled: lines of its journal to which all figures belong.
    at_s
        Time of the latest event.
    now_s, taken_unix_s
        When the picture was taken: seconds of the session, and seconds since 1970.
    longest
        Live trajectories, those with most work (generated and predicted tokens) first; not all of them.
    latest_ended
        Trajectories that ended last, latest first; not all of them.
    lengths
        A sample of the finished trajectories with a prediction; `lengths_seen`: of how many.
    lines_missing
        Events that the history could not take (0 unless it has failed).
    runs
        The sessions that are open now; the other figures are of all of them.
    name, environment
        Of the session with which the controller began.
    only
        The run whose trajectories these are (`history_pictures.picture_of_run`); empty: all.
    training
        None while nothing is trained.
    """

    format: int
    heddle_version: str
    session: str
    is_open: bool
    strategy: str
    journal_offset: int
    at_s: float
    now_s: float
    taken_unix_s: float
    counts: RunCounts
    engines: tuple[EngineView, ...]
    pools: tuple[PoolView, ...]
    actions: tuple[ActionView, ...]
    failures: tuple[FailureView, ...]
    moves: tuple[MoveView, ...]
    longest: tuple[TrajectoryView, ...]
    latest_ended: tuple[TrajectoryView, ...]
    series: RunSeries
    lengths: tuple[LengthPair, ...]
    lengths_seen: int
    lines_missing: int = 0
    runs: tuple[RunShare, ...] = ()
    training: TrainingView | None = None
    name: str = ""
    environment: str = ""
    rewards: RewardView = field(default_factory=RewardView)
    only: str = ""

    @property
    def title(self) -> str:
        """Names of the open runs; of the latest one when none is."""
        if self.runs:
            return ", ".join(run.title for run in self.runs)
        return title_of(self.name or self.session, self.environment)

    def as_json(self) -> dict[str, Any]:
        """JSON-able form; numbers that JSON does not have are null."""
        plain: dict[str, Any] = _plain(self)
        return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        if value and type(value[0]) in (int, str):  # a column: nothing in it to convert
            return list(value)
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
