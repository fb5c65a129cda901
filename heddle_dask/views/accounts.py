"""Where each second of a trajectory went: its time from submission to its end, cut into phases that sum to it exactly.

A trajectory may do several things at once: forks sample side by side, and a program may await a tool and a step
together. An instant counts once, for the phase that comes first in `Phase`: work before waiting, and waiting before
nothing. Times are whole nanoseconds inside, so that sums are exact.

What a record does not tell comes from the journal (`views.journal_facts`): the wait for admission, the waits for a
context to move, and attempts that gave no result. Without the journal these are unknown and said to be so, and their
seconds are in other parts: see `PHASE_TEXT`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryOutline

NS_PER_S = 1_000_000_000
# Clocks of two processes: a step that worked this much longer than it was open comes from an earlier session.
_TOLERANCE_S = 0.001


class Phase(StrEnum):
    """What a trajectory did at an instant; of several at once, the first of this list."""

    DECODE = "decode"
    PREFILL = "prefill"
    GENERATION = "generation"
    TOOL = "tool"
    REWARD = "reward"
    MIGRATION = "migration"
    TOOL_QUEUE = "tool_queue"
    QUOTA = "quota"
    SERVICE_LOAD = "service_load"
    LLM_QUEUE = "llm_queue"
    LOST = "lost"
    ADMISSION = "admission"
    DRIVER = "driver"


PHASE_TITLE: Mapping[Phase, str] = {
    Phase.ADMISSION: "admission",
    Phase.LLM_QUEUE: "LLM queue",
    Phase.MIGRATION: "exposed migration",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
    Phase.GENERATION: "step, not split",
    Phase.TOOL_QUEUE: "tool queue",
    Phase.QUOTA: "API quota",
    Phase.SERVICE_LOAD: "service load",
    Phase.TOOL: "tool",
    Phase.REWARD: "reward",
    Phase.LOST: "without result",
    Phase.DRIVER: "driver and rest",
}
"""In the order of reading: a trajectory's life."""

PHASE_TEXT: Mapping[Phase, str] = {
    Phase.ADMISSION: "from submission until the program starts",
    Phase.LLM_QUEUE: "a step waits for an engine, a slot and the control plane",
    Phase.MIGRATION: "a step waits until its context has moved to another engine",
    Phase.PREFILL: "an engine reads the context; with vLLM, also the wait in the engine's own queue",
    Phase.DECODE: "an engine generates",
    Phase.GENERATION: "a step of an engine that does not report its times",
    Phase.TOOL_QUEUE: "an action waits for cores, memory or GPUs, and the control plane",
    Phase.QUOTA: "an action waits for the quota of an API",
    Phase.SERVICE_LOAD: "an action waits until its model service is resident",
    Phase.TOOL: "a tool runs",
    Phase.REWARD: "a reward call runs",
    Phase.LOST: "attempts and calls that gave no result: their engine or host was lost, or they were cancelled",
    Phase.DRIVER: "the agent's own code, the driver, transport, and everything that is not measured",
}


class TimeSegment(NamedTuple):
    """A stretch of a trajectory's time, in nanoseconds of its session."""

    start_ns: int
    stop_ns: int
    phase: Phase


@dataclass(slots=True)
class StepWaits:
    """What the journal tells of one step, in seconds.

    Attributes
    ----------
    moving_s
        It waited while the context moved.
    stranded_s
        It ran on an engine that was lost with its worker, and waited again.
    failed_s
        Attempts that failed, from request to failure.
    """

    moving_s: float = 0.0
    stranded_s: float = 0.0
    failed_s: float = 0.0


@dataclass(slots=True)
class ControlFacts:
    """What the journal tells of one trajectory, by the clock of the session.

    Attributes
    ----------
    waits
        By path of the branch (``""``, ``"#1"``, …) and index of the step.
    attempts
        (path, step, start, end) of requests that ended without a result.
    """

    submitted_s: float = math.nan
    admitted_s: float = math.nan
    ended_s: float = math.nan
    waits: dict[tuple[str, int], StepWaits] = field(default_factory=dict)
    attempts: list[tuple[str, int, float, float]] = field(default_factory=list)
    paths: list[str] = field(default_factory=lambda: [""])

    @property
    def losses(self) -> int:
        """Attempts that failed or were stranded with their engine."""
        return sum((each.failed_s > 0) + (each.stranded_s > 0) for each in self.waits.values())

    @property
    def admission_s(self) -> float:
        """Seconds from submission to admission; nan where it was not admitted or the journal does not tell."""
        return self.admitted_s - self.submitted_s


@dataclass(frozen=True, slots=True)
class Account:
    """Where the time of one trajectory went.

    Attributes
    ----------
    segments
        Without gap and overlap, from the start to the end; the first is the wait for admission.
    phases_ns
        Nanoseconds by phase; their sum is `duration_ns`.
    duration_ns
        From submission, or from the start where the admission is unknown, to the end.
    admission_known, waits_known
        Whether the journal told the wait for admission, and moves and lost attempts.
    earlier_s
        Seconds of work that a resumed run took from an earlier session; not in the duration.
    """

    trajectory_id: str
    segments: tuple[TimeSegment, ...]
    phases_ns: Mapping[Phase, int]
    duration_ns: int
    admission_known: bool
    waits_known: bool
    earlier_s: float

    @property
    def duration_s(self) -> float:
        return self.duration_ns / NS_PER_S

    def seconds(self, phase: Phase) -> float:
        return self.phases_ns.get(phase, 0) / NS_PER_S

    def share(self, phase: Phase) -> float:
        return self.phases_ns.get(phase, 0) / self.duration_ns if self.duration_ns else 0.0


def account_of(record: TrajectoryOutline, facts: ControlFacts | None = None) -> Account:
    """Where the time of a finished trajectory went.

    Parameters
    ----------
    facts
        What the journal tells of it in the session in which it ended; None without a journal.
    """
    start_ns = _ns(record.started_s)
    stop_ns = max(start_ns, _ns(record.finished_s))
    spans: list[TimeSegment] = []
    earlier_s = 0.0
    paths = _paths_by_branch(record, facts)
    for step in record.steps:
        waits = None if facts is None else facts.waits.get((paths.get(step.branch, "?"), step.step_index))
        parts = _step_spans(step, waits or StepWaits())
        spans += parts or ()
        earlier_s += 0.0 if parts is not None else _known(step.prefill_s) + _known(step.decode_s)
    for action in record.actions:
        parts = _action_spans(action, stop_ns)
        spans += parts or ()
        earlier_s += 0.0 if parts is not None else _known(action.run_s)
    if facts is not None:
        spans += _spans_without_result(record, facts, paths)
    admission_ns = 0 if facts is None else max(0, _ns(facts.admission_s))
    admission = [TimeSegment(start_ns - admission_ns, start_ns, Phase.ADMISSION)] if admission_ns else []
    segments = (*admission, *flattened(spans, start_ns, stop_ns))
    return Account(
        trajectory_id=record.trajectory_id,
        segments=segments,
        phases_ns=summed(segments),
        duration_ns=stop_ns - start_ns + admission_ns,
        admission_known=facts is not None and not math.isnan(facts.admission_s),
        waits_known=facts is not None,
        earlier_s=earlier_s,
    )


def summed(segments: Iterable[TimeSegment]) -> dict[Phase, int]:
    sums: dict[Phase, int] = {}
    for start, stop, phase in segments:
        sums[phase] = sums.get(phase, 0) + stop - start
    return sums


def flattened(spans: Sequence[TimeSegment], start_ns: int, stop_ns: int) -> list[TimeSegment]:
    """Spans that may overlap and leave gaps, as segments that cover start to stop once; gaps are `Phase.DRIVER`."""
    inside = sorted(
        (max(start, start_ns), min(stop, stop_ns), _RANK[phase])
        for start, stop, phase in spans
        if min(stop, stop_ns) > max(start, start_ns)
    )
    overlap = any(second[0] < first[1] for first, second in itertools.pairwise(inside))
    segments: list[TimeSegment] = []
    reached = start_ns
    for start, stop, rank in _swept(inside) if overlap else inside:
        if start > reached:
            segments.append(TimeSegment(reached, start, Phase.DRIVER))
        phase = _PHASES[rank]
        if segments and segments[-1].phase is phase and segments[-1].stop_ns == start:
            segments[-1] = TimeSegment(segments[-1].start_ns, stop, phase)
        else:
            segments.append(TimeSegment(start, stop, phase))
        reached = stop
    if stop_ns > reached:
        segments.append(TimeSegment(reached, stop_ns, Phase.DRIVER))
    return segments


_PHASES = tuple(Phase)
_RANK = {phase: rank for rank, phase in enumerate(_PHASES)}


def _swept(spans: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Between any two ends of overlapping spans, the lowest rank that is open."""
    changes = sorted([(start, 1, rank) for start, _, rank in spans] + [(stop, -1, rank) for _, stop, rank in spans])
    open_of = [0] * len(_PHASES)
    previous = 0
    for at, change, rank in changes:
        if at > previous:
            first = next((each for each, count in enumerate(open_of) if count), None)
            if first is not None:
                yield previous, at, first
        open_of[rank] += change
        previous = at


def _step_spans(step: StepRecord, waits: StepWaits) -> list[TimeSegment] | None:
    """The phases of one step inside its time: waiting first, then prefill and decode, as most steps have it.

    A preempted step has several of each; their sums are right, their order is not. None: the record's times are of an
    earlier session, whose result was taken from the journal.
    """
    start, stop = _ns(step.submitted_s), _ns(step.finished_s)
    whole = max(0, stop - start)
    if not worked_here(step):
        return None
    decode = min(max(0, _ns(step.decode_s)), whole)
    prefill = min(max(0, _ns(step.prefill_s)), whole - decode)
    left = whole - prefill - decode
    queue = min(max(0, _ns(step.queue_s)), left)
    left -= queue
    moving = min(_ns(waits.moving_s), queue)
    stranded = min(_ns(waits.stranded_s), queue - moving)
    failed = min(_ns(waits.failed_s), left)
    left -= failed
    is_split = not (math.isnan(step.queue_s) or math.isnan(step.prefill_s) or math.isnan(step.decode_s))
    phases = (
        (Phase.LLM_QUEUE, queue - moving - stranded),
        (Phase.MIGRATION, moving),
        (Phase.LOST, stranded + failed),
        (Phase.DRIVER if is_split else Phase.GENERATION, left),
        (Phase.PREFILL, prefill),
        (Phase.DECODE, decode),
    )
    return list(_one_after_another(start, phases))


def _action_spans(action: ActionRecord, end_ns: int) -> list[TimeSegment] | None:
    """Waiting, then running; None as for `_step_spans`."""
    start = _ns(action.submitted_s)
    if math.isnan(action.finished_s):
        return [TimeSegment(start, end_ns, Phase.LOST)]
    whole = max(0, _ns(action.finished_s) - start)
    if action.status == "lost":
        return [TimeSegment(start, start + whole, Phase.LOST)]
    if not worked_here(action):
        return None
    ran = min(max(0, _ns(action.run_s)), whole)
    runs = Phase.REWARD if action.kind == "reward" else Phase.TOOL
    waited = whole - ran
    quota = min(max(0, _ns(action.quota_s)), waited)
    load = min(max(0, _ns(action.load_s)), waited - quota)
    cores = waited - quota - load
    phases = ((Phase.QUOTA, quota), (Phase.TOOL_QUEUE, cores), (Phase.SERVICE_LOAD, load), (runs, ran))
    return list(_one_after_another(start, phases))


def _one_after_another(start: int, phases: Iterable[tuple[Phase, int]]) -> Iterator[TimeSegment]:
    for phase, length in phases:
        if length > 0:
            if phase is not Phase.DRIVER:
                yield TimeSegment(start, start + length, phase)
            start += length


def _spans_without_result(
    record: TrajectoryOutline, facts: ControlFacts, paths: Mapping[int, str]
) -> Iterator[TimeSegment]:
    """Requests of steps that have no record: they were lost or cancelled."""
    if math.isnan(facts.admitted_s):
        return
    # The driver's clock and the session's have an offset; the program starts when its admission arrives.
    offset_s = record.started_s - facts.admitted_s
    has_record = {(paths.get(step.branch, "?"), step.step_index) for step in record.steps}
    for path, index, start_s, stop_s in facts.attempts:
        if (path, index) not in has_record:
            stop_s = record.finished_s - offset_s if math.isnan(stop_s) else stop_s
            yield TimeSegment(_ns(start_s + offset_s), _ns(stop_s + offset_s), Phase.LOST)


def _paths_by_branch(record: TrajectoryOutline, facts: ControlFacts | None) -> dict[int, str]:
    """Path of each branch by its number; only of the first where the numbers of forks cannot be told."""
    if facts is None:
        return {}
    numbers = {0, *(step.branch for step in record.steps), *(action.branch for action in record.actions)}
    # A record has each branch before its own forks.
    paths = sorted(facts.paths, key=lambda path: [int(number) for number in path.split("#")[1:]])
    if len(numbers) != len(paths):
        return {0: ""}
    return dict(zip(sorted(numbers), paths, strict=True))


def worked_here(phase: StepRecord | ActionRecord) -> bool:
    """Whether its time of work fits into its time: False for results that a resumed run took from its journal."""
    worked_s = (
        _known(phase.prefill_s) + _known(phase.decode_s) if isinstance(phase, StepRecord) else _known(phase.run_s)
    )
    # Of what has no times, nothing can be said against it: max keeps 0.0 against nan.
    return worked_s <= max(0.0, phase.finished_s - phase.submitted_s) + _TOLERANCE_S


def work_began_s(step: StepRecord) -> float:
    """When the work on a step of this session began: before that it waited."""
    if math.isnan(step.prefill_s) or math.isnan(step.decode_s):
        return min(step.finished_s, step.submitted_s + _known(step.queue_s))
    return max(step.submitted_s, step.finished_s - step.prefill_s - step.decode_s)


def _ns(seconds: float) -> int:
    """Whole nanoseconds; 0 for what is unknown."""
    return round(seconds * NS_PER_S) if math.isfinite(seconds) else 0


def _known(seconds: float) -> float:
    return 0.0 if math.isnan(seconds) else seconds
