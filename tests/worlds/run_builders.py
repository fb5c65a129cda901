"""Runs for the tests of reports and traces: records with times that fit, and what a journal tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from worlds.record_builders import plain_trajectory

from heddle_dask.core import commands as cm
from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId, HostId, StepId, TrajectoryId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.nouns import (
    EngineDescription,
    GroupId,
    HostDescription,
    Prediction,
    Priority,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.resources import Resources
from heddle_dask.records.trajectory import ActionRecord, StepRecord, TrajectoryOutline, TrajectoryRecord
from heddle_dask.views.report.journal_facts import SessionFacts

OFFSET_S = 3.0
"""What the records' clock is ahead of the session's."""


def timed_trajectory(number: int, steps: int = 3, *, name: str = "", start_s: float | None = None) -> TrajectoryRecord:
    """Steps of 2 s on two engines in turn (0.5 waiting, 0.5 prefill, 1 decode), each with a tool call of 1 s."""
    record = plain_trajectory(number, steps)
    begin_s = number * 0.5 + 10 if start_s is None else start_s
    timed: list[StepRecord] = []
    actions: list[ActionRecord] = []
    for index, step in enumerate(record.steps):
        at_s = begin_s + 3 * index
        timed.append(
            replace(
                step, submitted_s=at_s, finished_s=at_s + 2, queue_s=0.5, prefill_s=0.5, decode_s=1.0,
                cached_tokens=step.prompt_tokens,
            )
        )  # fmt: skip
        actions.append(ActionRecord(index, index, "tool", "python", 2, "ok", at_s + 2, at_s + 3, 0.25, 0.75))
    return replace(
        record,
        trajectory_id=name or record.trajectory_id,
        steps=tuple(timed),
        actions=tuple(actions),
        started_s=begin_s,
        finished_s=begin_s + 3 * steps + 0.5,
    )


def outline_of(record: TrajectoryRecord) -> TrajectoryOutline:
    """The record without its tokens."""
    names = TrajectoryOutline.__dataclass_fields__
    return TrajectoryOutline(**{name: getattr(record, name) for name in names})


def journal_lines(records: Sequence[TrajectoryRecord], waited_s: float = 1.0) -> list[Any]:
    """Lines of a session in which these ran; a move before each step on another engine, of which 0.25 s is exposed."""
    events: list[tuple[Any, ...]] = [(ev.HostJoined(0.0, HostDescription(HostId("h"), Resources.of(cpus=8))),)]
    engines = sorted({step.engine_id for record in records for step in record.steps})
    events += [(ev.EngineJoined(0.1, EngineDescription(EngineId(name), 4, 4096)),) for name in engines]
    for record in records:
        events += _lines_of(record, waited_s)
    ordered = sorted(events, key=lambda line: line[0].at)
    return [[encode(event), [encode(command) for command in commands]] for event, *commands in ordered]


def _lines_of(record: TrajectoryRecord, waited_s: float) -> list[tuple[Any, ...]]:
    name = TrajectoryId(record.trajectory_id)
    admitted_s = record.started_s - OFFSET_S
    spec = TrajectorySpec(name, GroupId(record.group_id))
    tokens = sum(step.generated_tokens for step in record.steps)
    lines: list[tuple[Any, ...]] = [
        (ev.TrajectorySubmitted(admitted_s - waited_s, spec),),
        (
            ev.PredictionMade(admitted_s, name, 0, Prediction(2.0 * tokens, 3.0 * tokens, "oracle")),
            cm.AdmitTrajectory(name),
        ),
    ]
    before = ""
    for step in record.steps:
        at, step_id = step.submitted_s - OFFSET_S, StepId(name, step.step_index, 0)
        engine = EngineId(step.engine_id)
        start = cm.StartStep(step_id, engine, Priority(0, 0.0), step.step_index)
        if before and before != engine:
            move = cm.MoveContext(name, EngineId(before), engine, "transfer")
            lines.append((ev.HostJoined(at - 0.5, HostDescription(HostId(f"{name}-{at}"), Resources.of(cpus=0))), move))
            lines.append((ev.StepRequested(at, StepRequest(step_id, step.prompt_tokens, 10)),))
            lines.append((ev.MoveEnded(at + 0.25, name, engine, True, "transfer", 0.75, tokens=9), start))
        else:
            lines.append((ev.StepRequested(at, StepRequest(step_id, step.prompt_tokens, 10)), start))
        lines.append((ev.StepStarted(at + 0.5, step_id, engine),))
        lines.append((ev.StepFinished(step.finished_s - OFFSET_S, step_id, engine, step.generated_tokens, 0, "stop"),))
        before = engine
    lines.append((ev.TrajectoryEnded(record.finished_s - OFFSET_S, name, record.status),))
    return lines


def session_of(records: Sequence[TrajectoryRecord], waited_s: float = 1.0) -> SessionFacts:
    """What the journal of such a session tells."""
    facts = SessionFacts()
    facts.take(journal_lines(records, waited_s))
    return facts


def hostile_trajectory() -> TrajectoryRecord:
    """Names and messages with everything that HTML and JSON would take for their own."""
    text = '<script>alert("x")</script>\'&</title>'
    record = timed_trajectory(0, name=text)
    steps = tuple(replace(step, engine_id=text) for step in record.steps)
    actions = tuple(replace(action, label=text) for action in record.actions)
    return replace(record, steps=steps, actions=actions, status="failed", cause="agent", detail=text)
