"""What a session's journal tells: each fact from the rows of hand-made events, and sums over recorded sessions."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from heddle_dask.core import commands as cm
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import EngineId, StepId, TrajectoryId
from heddle_dask.core.journal_codec import decode, encode, gap
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
from heddle_dask.strategies.presets import strategies_of_run
from heddle_dask.views.report.journal_facts import SessionFacts

JOURNALS = sorted((Path(__file__).parent.parent / "journals").glob("*.jsonl.gz"))
A, B = EngineId("a"), EngineId("b")


def _name(text: str) -> TrajectoryId:
    return TrajectoryId(text)


def _folded(*lines: tuple[Any, ...]) -> SessionFacts:
    facts = SessionFacts()
    facts.take([[encode(event), [encode(command) for command in commands]] for event, *commands in lines])
    return facts


def _submitted(at: float, name: str) -> ev.TrajectorySubmitted:
    return ev.TrajectorySubmitted(at, TrajectorySpec(_name(name), GroupId("g")))


def _requested(at: float, name: str, index: int = 0, attempt: int = 0) -> ev.StepRequested:
    return ev.StepRequested(at, StepRequest(StepId(_name(name), index, attempt), 10, 20))


def _start(name: str, engine: EngineId, index: int = 0, attempt: int = 0) -> cm.StartStep:
    return cm.StartStep(StepId(_name(name), index, attempt), engine, Priority(0, 0.0), 1)


def _joined(at: float, engine: EngineId) -> ev.EngineJoined:
    return ev.EngineJoined(at, EngineDescription(engine, 4, 100))


def _admitted(name: str) -> tuple[Any, ...]:
    return _submitted(1.0, name), cm.AdmitTrajectory(_name(name))


def test_admission() -> None:
    facts = _folded(
        (_submitted(1.0, "t"),),
        (ev.TrajectoryEnded(5.0, _name("x"), "completed"), cm.AdmitTrajectory(_name("t"))),
        (ev.TrajectoryEnded(9.0, _name("t"), "completed"),),
    )
    assert facts.trajectories["t"].admission_s == 4.0 and facts.trajectories["t"].ended_s == 9.0
    assert facts.events == 3 and facts.last_s == 9.0


def test_an_engine_is_idle_beside_a_queue_while_it_has_no_step_and_another_waits() -> None:
    facts = _folded(
        (_joined(0.0, A),),
        _admitted("t"),
        _admitted("u"),
        (_requested(2.0, "t"), _start("t", A)),
        (ev.StepStarted(2.0, StepId(_name("t"), 0, 0), A),),
        (_joined(3.0, B),),
        (_requested(4.0, "u"), _start("u", A)),  # B is idle and u waits until 9
        (_joined(6.0, EngineId("late")),),
        (ev.StepFailed(9.0, StepId(_name("u"), 0, 0), A, "x"),),
        (_requested(10.0, "u", attempt=1), _start("u", B, attempt=1)),
        (ev.StepStarted(12.0, StepId(_name("u"), 0, 1), B),),
        (ev.EngineLost(20.0, B, "died", True),),  # u waits again; late is idle until the end
        (ev.StepStarted(21.0, StepId(_name("t"), 0, 0), A),),
    )
    idle_s = {name: facts.idle.seconds(name) for name in ("a", "b", "late")}
    assert idle_s == {"a": 0.0, "b": 5.0, "late": 3.0 + 2.0 + 1.0}


def test_a_move_that_a_step_waits_for() -> None:
    facts = _folded(
        _admitted("t"),
        (ev.ActionFinished(2.0, "t/a0", "h", 1.0), cm.MoveContext(_name("t"), A, B, "transfer")),  # type: ignore[arg-type]
        (_requested(3.0, "t"),),
        (ev.MoveEnded(5.5, _name("t"), B, True, "transfer", 3.5, tokens=70), _start("t", B)),
        (_requested(9.0, "t", 1), _start("t", B, 1), cm.MoveContext(_name("t"), B, A, "recompute")),
        (ev.MoveEnded(9.5, _name("t"), A, False, "recompute", 0.5, cause="gone"),),
    )
    first, second = facts.moves
    assert (first.exposed_s, first.ok, first.tokens, first.ended_s) == (2.5, True, 70, 5.5)
    assert (second.exposed_s, second.ok, second.cause) == (0.0, False, "gone")
    assert facts.trajectories["t"].waits["", 0].moving_s == 2.5


def test_attempts_without_result() -> None:
    facts = _folded(
        _admitted("t"),
        (_requested(2.0, "t"), _start("t", A)),
        (ev.StepFailed(4.0, StepId(_name("t"), 0, 0), A, ev.ENGINE_LOST),),
        (_requested(5.0, "t", 0, 1), _start("t", B, 0, 1)),
        (ev.StepFinished(6.0, StepId(_name("t"), 0, 1), B, 5, 0, "stop"),),
        (_requested(7.0, "t", 1),),
        (ev.StepCancelled(8.0, StepId(_name("t"), 1, 0)),),
        (_requested(9.0, "t", 1, 1),),
        (ev.TrajectoryEnded(10.0, _name("t"), "aborted"),),
    )
    mine = facts.trajectories["t"]
    assert mine.waits["", 0].failed_s == 2.0
    *ended, last = mine.attempts
    assert ended == [("", 0, 2.0, 4.0), ("", 1, 7.0, 8.0)]
    assert last[:3] == ("", 1, 9.0) and math.isnan(last[3])


def test_a_step_that_is_stranded_with_its_worker() -> None:
    facts = _folded(
        _admitted("t"),
        (_joined(1.5, A),),
        (_requested(2.0, "t"), _start("t", A)),
        (ev.StepStarted(3.0, StepId(_name("t"), 0, 0), A),),
        (ev.EngineLost(7.0, A, "worker died", True),),
    )
    assert facts.trajectories["t"].waits["", 0].stranded_s == 4.0
    assert (facts.engines["a"].slots, facts.engines["a"].lost_s, facts.engines["a"].reason) == (
        4,
        7.0,
        "worker died",
    )


def test_forks_are_with_the_trajectory_they_left() -> None:
    fork = TrajectorySpec(_name("t#1"), GroupId("g"))
    facts = _folded(
        _admitted("t"),
        (ev.TrajectoryForked(2.0, fork, _name("t")),),
        (_requested(3.0, "t#1", 2),),
        (ev.StepFailed(4.0, StepId(_name("t#1"), 2, 0), A, "x"),),
    )
    mine = facts.trajectories["t"]
    assert mine.paths == ["", "#1"] and mine.waits["#1", 2].failed_s == 1.0


def test_predictions_hosts_aborts_and_missing_lines() -> None:
    facts = _folded(
        (ev.HostJoined(0.5, HostDescription("h", Resources.of(cpus=8))),),  # type: ignore[arg-type]
        (ev.HostLost(8.0, "h"),),  # type: ignore[arg-type]
        _admitted("t"),
        (ev.PredictionMade(2.0, _name("t"), 1, Prediction(50.0, 90.0, "oracle")),),
        (_requested(3.0, "x"), cm.AbortStep(StepId(_name("t"), 0, 0), A, "preempted")),
    )
    facts.take([gap(17)])
    assert facts.hosts["h"].cpus == 8 and facts.hosts["h"].lost_s == 8.0
    (made,) = facts.predictions["t"]
    assert (made.steps_finished, made.tokens, made.tokens_q90, made.source) == (1, 50.0, 90.0, "oracle")
    assert facts.aborts == [(3.0, "t", "a", "preempted")] and facts.missing == 17


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.name.partition(".")[0])
def test_moves_of_recorded_sessions_are_those_that_the_controller_counts(journal: Path) -> None:
    with gzip.open(journal, "rt", encoding="utf-8") as file:
        about, *lines = (json.loads(line) for line in file)
    facts, controller = SessionFacts(), Controller(strategies_of_run(about))
    facts.take(lines)
    for event, _ in lines:
        controller.handle(decode(event))  # type: ignore[arg-type]
    totals = controller.moves.totals
    ended = [move for move in facts.moves if move.ok is not None]
    assert len(facts.moves) == sum(each.started for each in totals.values())
    assert sum(not move.ok for move in ended) == sum(each.failed for each in totals.values())
    assert sum(move.exposed_s for move in ended) == pytest.approx(sum(each.exposed_s for each in totals.values()))
    assert sum(map(len, facts.predictions.values())) == sum(event[0] == "PredictionMade" for event, _ in lines)
    admitted = [each for each in facts.trajectories.values() if not math.isnan(each.admitted_s)]
    assert len(admitted) > 10 and all(each.admission_s >= 0 for each in admitted)
