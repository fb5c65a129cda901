"""The tables: total, closed, and what their cells promise."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, get_args

import pytest
from worlds.core_builders import Stage

import heddle_dask
from heddle_dask.core.commands import StartStep
from heddle_dask.core.errors import InvalidTransition
from heddle_dask.core.transitions import (
    ACTION,
    BREAKER,
    COPY,
    ENGINE,
    KV,
    LATE,
    MACHINES,
    NEVER,
    TRAJECTORY,
    WEIGHTS,
    ActionEvent,
    ActionState,
    BreakerEvent,
    BreakerState,
    CopyEvent,
    CopyState,
    EngineEvent,
    EngineState,
    KvEvent,
    KvState,
    Machine,
    Mark,
    TrajectoryEvent,
    TrajectoryState,
    WeightsEvent,
    WeightsState,
)
from heddle_dask.records.trajectory import Cause, Status
from scripts.states_page import states_page

TABLES: dict[str, tuple[Machine[Any, Any], type[Enum], type[Enum], Enum]] = {
    "trajectory": (TRAJECTORY, TrajectoryState, TrajectoryEvent, TrajectoryState.SUBMITTED),
    "kv": (KV, KvState, KvEvent, KvState.ABSENT),
    "engine": (ENGINE, EngineState, EngineEvent, EngineState.READY),
    "action": (ACTION, ActionState, ActionEvent, ActionState.WAITING),
    "circuit breaker": (BREAKER, BreakerState, BreakerEvent, BreakerState.CLOSED),
    "weights": (WEIGHTS, WeightsState, WeightsEvent, WeightsState.SETTLED),
    "copy": (COPY, CopyState, CopyEvent, CopyState.CLEARING),
}
each_table = pytest.mark.parametrize(("machine", "states", "events", "first"), TABLES.values(), ids=TABLES.keys())


@each_table
def test_every_pair_has_a_cell_and_no_row_is_of_another_machine(
    machine: Machine[Any, Any], states: type[Enum], events: type[Enum], first: Enum
) -> None:
    assert list(machine.rows) == list(states)
    for row in machine.rows.values():
        assert set(row) == set(events)
        assert all(isinstance(cell, states | Mark) for cell in row.values())


@each_table
def test_next_state_follows_the_cell_in_every_pair(
    machine: Machine[Any, Any], states: type[Enum], events: type[Enum], first: Enum
) -> None:
    for state in states:
        for event in events:
            cell = machine.rows[state][event]
            if cell is NEVER:
                with pytest.raises(InvalidTransition) as raised:
                    machine.next_state(state, event, "its history")
                told = str(raised.value)
                assert machine.name in told
                assert f"'{event.value}'" in told
                assert f"'{state.value}'" in told
                assert told.endswith("its history")
            elif cell is LATE:
                assert machine.next_state(state, event) is None
            else:
                assert machine.next_state(state, event) is cell


@each_table
def test_every_state_can_be_reached(
    machine: Machine[Any, Any], states: type[Enum], events: type[Enum], first: Enum
) -> None:
    reached, todo = {first}, [first]
    while todo:
        for cell in machine.rows[todo.pop()].values():
            if not isinstance(cell, Mark) and cell not in reached:
                reached.add(cell)
                todo.append(cell)
    assert reached == set(states)


@pytest.mark.parametrize(
    ("machine", "last"),
    [
        (TRAJECTORY, TrajectoryState.ENDED),
        (ENGINE, EngineState.LOST),
        (ACTION, ActionState.ENDED),
    ],
)
def test_last_states_ignore_everything(machine: Machine[Any, Any], last: Enum) -> None:
    assert set(machine.rows[last].values()) == {LATE}


def test_a_trajectory_can_end_in_every_state() -> None:
    for state, row in TRAJECTORY.rows.items():
        assert row[TrajectoryEvent.ENDED] in (TrajectoryState.ENDED, LATE), state


def test_only_steps_at_an_engine_can_be_stranded() -> None:
    stranded = {s for s, row in TRAJECTORY.rows.items() if row[TrajectoryEvent.STRANDED] not in (NEVER, LATE)}
    assert stranded == {TrajectoryState.QUEUED, TrajectoryState.GENERATING}


def test_every_engine_state_can_be_lost() -> None:
    for state in (EngineState.READY, EngineState.LOADING, EngineState.DRAINING):
        assert ENGINE.next_state(state, EngineEvent.LOST) is EngineState.LOST


def test_a_table_without_a_row_is_refused_and_what_a_row_does_not_name_is_late_or_impossible() -> None:
    with pytest.raises(KeyError, match="OPEN"):
        Machine("breaker", BreakerState, BreakerEvent, late=(), rows={BreakerState.CLOSED: {}})
    rows = {state: {BreakerEvent.COOLED: state} for state in BreakerState}
    late, over = (BreakerEvent.FAILED,), (BreakerState.OPEN,)
    made = Machine("breaker", BreakerState, BreakerEvent, late=late, rows=rows, over=over)
    assert set(made.rows[BreakerState.OPEN].values()) == {LATE}
    assert made.rows[BreakerState.CLOSED] == {
        BreakerEvent.SUCCEEDED: NEVER,
        BreakerEvent.FAILED: LATE,
        BreakerEvent.FAILED_TOO_OFTEN: NEVER,
        BreakerEvent.COOLED: BreakerState.CLOSED,
    }


def test_machines_lists_all_of_them() -> None:
    assert {machine.name for machine in MACHINES} == {
        "trajectory",
        "kv cache",
        "engine",
        "action",
        "service copy",
        "circuit breaker",
        "weights of an engine",
    }


# -- the coupling rules of the module's docstring, through the controller --------------------------------


def test_rule_1_a_lost_engine_strands_queued_and_generating_steps() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a", "b")
    stage.start(stage.placed("a"))
    stage.placed("b")
    stage.lose("E1")
    assert stage.trajectory("a").state is TrajectoryState.WAITING
    assert stage.trajectory("b").state is TrajectoryState.WAITING


def test_rules_2_and_3_kv_is_written_by_a_step_and_lost_with_its_engine() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    step = stage.placed("a")
    assert stage.trajectory("a").kv is KvState.ABSENT
    stage.finish(step)
    assert stage.trajectory("a").kv is KvState.RESIDENT
    stage.lose("E1")
    assert stage.trajectory("a").kv is KvState.LOST


def test_rule_4_a_trajectory_that_ends_frees_its_kv_and_cancels_its_waiting_actions() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a")
    stage.finish(stage.placed("a"))
    stage.act("a1", "a")
    record = stage.trajectory("a")
    stage.end("a")
    assert record.kv is KvState.ABSENT
    assert record.state is TrajectoryState.ENDED
    assert not stage.state.actions
    assert not stage.state.waiting_actions


def test_rule_5_a_step_waits_while_its_kv_moves() -> None:
    stage = Stage()
    stage.join("E1")
    stage.submit("a", "b")
    stage.finish(stage.placed("a"))
    stage.trajectory("a").advance_kv(KvEvent.MOVE_STARTED)
    assert stage.request("a", 1) == []
    assert stage.join("E2") == []
    stage.trajectory("a").advance_kv(KvEvent.MOVE_ENDED)
    (command,) = stage.join("E3")
    assert isinstance(command, StartStep)
    assert (command.step_id.trajectory_id, command.engine_id) == ("a", "E1")


# -- the page --------------------------------------------------------------------------------------------


def test_the_page_of_states_is_the_one_that_the_tables_give() -> None:
    page = Path(__file__).parents[2] / "docs" / "states.md"
    assert page.read_text(encoding="utf-8") == states_page(), "run: python -m scripts.states_page > docs/states.md"


def test_the_page_names_every_state_and_event() -> None:
    page = states_page()
    for _, states, events, _ in TABLES.values():
        for member in (*states, *events):
            assert str(member.value) in page
    assert "5. A trajectory whose KV is MOVING is not dispatched" in page


def test_every_event_of_a_machine_has_a_producer() -> None:
    """A state that no code can enter is no state: each event occurs in a handler, outside the tables."""
    package = Path(heddle_dask.__file__).parent
    sources = "".join(
        path.read_text() for path in sorted((package / "core").glob("*.py")) if path.name != "transitions.py"
    )
    for events in (TrajectoryEvent, KvEvent, EngineEvent, WeightsEvent, ActionEvent, BreakerEvent):
        missing = [event.name for event in events if f"{events.__name__}.{event.name}" not in sources]
        assert missing == [], events.__name__


def test_every_state_is_entered_by_an_event_or_is_the_first() -> None:
    for machine in MACHINES:
        first, *others = machine.rows
        entered = {cell for row in machine.rows.values() for cell in row.values()}
        assert set(others) <= entered, (machine.name, first)


def test_every_status_and_cause_of_a_trajectory_has_a_producer() -> None:
    drivers = (Path(heddle_dask.__file__).parent / "live" / "driver").rglob("*.py")
    source = "".join(path.read_text() for path in sorted(drivers))
    for value in (*get_args(Status), *filter(None, get_args(Cause))):
        assert f'"{value}"' in source, value
