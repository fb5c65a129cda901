"""Four small state machines and their coupling. Everything that affects a transition is in this file.

Four and not one, because they overlap: a trajectory acts while its KV cache moves. Every machine is a
table with a row per state and a column per event. A cell is the next state, `LATE` (the event is stale: ignored and
counted), or `NEVER` (the event is impossible: a bug, raised with the history).

The cells apply to the *current* attempt at the *current* engine. `Controller` filters messages of superseded attempts
before, because their identity distinguishes them, not the state.

Coupling, in one place:

1. An engine that is lost strands its queued and generating trajectories: `STRANDED`, hence WAITING.
2. An engine that is lost loses the KV caches on it: KV `ENGINE_LOST`.
3. A step that finishes leaves its KV on its engine: KV `WRITTEN`; not when that engine is lost.
4. A trajectory that ends frees its KV: KV `DROPPED`; its waiting actions are `CANCELLED`.
5. A trajectory whose KV is MOVING is not dispatched before the move ends.
6. An engine that drains gives up its residents: their KV moves, or is left behind (KV `DROPPED`) when the move fails or
   the engine is about to end. Without residents and moves, and once no queued step has to fetch its context from it,
   it is DRAINED.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from heddle_dask.core.errors import InvalidTransition


class TrajectoryState(Enum):
    """State of a trajectory's program."""

    SUBMITTED = "submitted"  # waits for admission
    THINKING = "thinking"  # its program runs on the driver
    WAITING = "waiting"  # its step waits for an engine
    QUEUED = "queued"  # its step is placed and has not started
    GENERATING = "generating"  # its step has started on its engine (`events.StepStarted`)
    ACTING = "acting"  # it waits for actions only
    ENDED = "ended"


# States with an open step: requested, without a result yet.
STEP_STATES: Final = frozenset({TrajectoryState.WAITING, TrajectoryState.QUEUED, TrajectoryState.GENERATING})


class TrajectoryEvent(Enum):
    """Events of the trajectory machine."""

    ADMITTED = "admitted"
    STEP_REQUESTED = "step requested"
    PLACED = "placed"
    STARTED = "started"
    STEP_ENDED = "step ended"
    STRANDED = "stranded"
    ACTION_REQUESTED = "action requested"
    LAST_ACTION_ENDED = "last action ended"
    ENDED = "ended"


class KvState(Enum):
    """State of a trajectory's KV cache, as known to the controller."""

    ABSENT = "absent"
    RESIDENT = "resident"
    MOVING = "moving"
    LOST = "lost"


class KvEvent(Enum):
    """Events of the KV machine."""

    WRITTEN = "written"
    MOVE_STARTED = "move started"
    MOVE_ENDED = "move ended"
    MOVE_FAILED = "move failed"
    ENGINE_LOST = "engine lost"
    DROPPED = "dropped"


class EngineState(Enum):
    """Whether an engine takes steps. An engine joins when it is ready, so there is no STARTING."""

    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"  # empty after a drain
    LOST = "lost"


class EngineEvent(Enum):
    """Events of the engine machine."""

    DRAIN_ORDERED = "drain ordered"
    EMPTIED = "emptied"
    LOST = "lost"


class ActionState(Enum):
    """State of an action."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class ActionEvent(Enum):
    """Events of the action machine."""

    STARTED = "started"
    FINISHED = "finished"
    HOST_LOST = "host lost"
    CANCELLED = "cancelled"


class Mark(Enum):
    """Table cells that are not a state."""

    LATE = "late"
    NEVER = "never"


LATE: Final = Mark.LATE
NEVER: Final = Mark.NEVER

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Machine(Generic[S, E]):
    """A named, total transition table.

    Raises
    ------
    ValueError
        At construction, if a state lacks a row or a row lacks an event.
    """

    def __init__(
        self, name: str, states: type[S], events: type[E], rows: Mapping[S, Mapping[E, S | Mark]]
    ) -> None:
        self.name = name
        self.rows = rows
        for state in states:
            missing = [event.name for event in events if event not in rows.get(state, {})]
            if missing:
                raise ValueError(f"{name}: state {state.name} has no cell for {', '.join(missing)}")

    def next_state(self, state: S, event: E, history: str = "") -> S | None:
        """The state after `event`, or None when the event is stale and to be ignored.

        Raises
        ------
        InvalidTransition
            The cell is `NEVER`; the message contains `history`.
        """
        cell = self.rows[state][event]
        if cell is NEVER:
            raise InvalidTransition(
                f"{self.name}: '{event.value}' cannot happen in state '{state.value}'; {history}"
            )
        return None if isinstance(cell, Mark) else cell


T, TE = TrajectoryState, TrajectoryEvent
TRAJECTORY: Final[Machine[TrajectoryState, TrajectoryEvent]] = Machine(
    "trajectory",
    TrajectoryState,
    TrajectoryEvent,
    {
        T.SUBMITTED: {
            TE.ADMITTED: T.THINKING,
            TE.STEP_REQUESTED: NEVER,
            TE.PLACED: NEVER,
            TE.STARTED: NEVER,
            TE.STEP_ENDED: NEVER,
            TE.STRANDED: NEVER,
            TE.ACTION_REQUESTED: NEVER,
            TE.LAST_ACTION_ENDED: NEVER,
            TE.ENDED: T.ENDED,
        },
        T.THINKING: {
            TE.ADMITTED: NEVER,
            TE.STEP_REQUESTED: T.WAITING,
            TE.PLACED: NEVER,
            TE.STARTED: LATE,
            TE.STEP_ENDED: LATE,
            TE.STRANDED: NEVER,
            TE.ACTION_REQUESTED: T.ACTING,
            TE.LAST_ACTION_ENDED: T.THINKING,  # of an action concurrent with a step
            TE.ENDED: T.ENDED,
        },
        T.WAITING: {
            TE.ADMITTED: NEVER,
            TE.STEP_REQUESTED: NEVER,
            TE.PLACED: T.QUEUED,
            TE.STARTED: LATE,
            TE.STEP_ENDED: LATE,
            TE.STRANDED: NEVER,
            TE.ACTION_REQUESTED: T.WAITING,
            TE.LAST_ACTION_ENDED: T.WAITING,
            TE.ENDED: T.ENDED,
        },
        T.QUEUED: {
            TE.ADMITTED: NEVER,
            TE.STEP_REQUESTED: NEVER,
            TE.PLACED: T.QUEUED,
            TE.STARTED: T.GENERATING,
            TE.STEP_ENDED: T.THINKING,
            TE.STRANDED: T.WAITING,
            TE.ACTION_REQUESTED: T.QUEUED,
            TE.LAST_ACTION_ENDED: T.QUEUED,
            TE.ENDED: T.ENDED,
        },
        T.GENERATING: {
            TE.ADMITTED: NEVER,
            TE.STEP_REQUESTED: NEVER,
            TE.PLACED: NEVER,
            TE.STARTED: LATE,
            TE.STEP_ENDED: T.THINKING,
            TE.STRANDED: T.WAITING,
            TE.ACTION_REQUESTED: T.GENERATING,
            TE.LAST_ACTION_ENDED: T.GENERATING,
            TE.ENDED: T.ENDED,
        },
        T.ACTING: {
            TE.ADMITTED: NEVER,
            TE.STEP_REQUESTED: T.WAITING,
            TE.PLACED: NEVER,
            TE.STARTED: LATE,
            TE.STEP_ENDED: LATE,
            TE.STRANDED: NEVER,
            TE.ACTION_REQUESTED: T.ACTING,
            TE.LAST_ACTION_ENDED: T.THINKING,
            TE.ENDED: T.ENDED,
        },
        T.ENDED: {event: LATE for event in TE},
    },
)

K, KE = KvState, KvEvent
KV: Final[Machine[KvState, KvEvent]] = Machine(
    "kv cache",
    KvState,
    KvEvent,
    {
        K.ABSENT: {
            KE.WRITTEN: K.RESIDENT,
            KE.MOVE_STARTED: NEVER,
            KE.MOVE_ENDED: LATE,
            KE.MOVE_FAILED: LATE,
            KE.ENGINE_LOST: LATE,
            KE.DROPPED: LATE,
        },
        K.RESIDENT: {
            KE.WRITTEN: K.RESIDENT,
            KE.MOVE_STARTED: K.MOVING,
            KE.MOVE_ENDED: LATE,
            KE.MOVE_FAILED: LATE,
            KE.ENGINE_LOST: K.LOST,
            KE.DROPPED: K.ABSENT,
        },
        K.MOVING: {
            KE.WRITTEN: NEVER,
            KE.MOVE_STARTED: NEVER,
            KE.MOVE_ENDED: K.RESIDENT,
            KE.MOVE_FAILED: K.RESIDENT,
            KE.ENGINE_LOST: K.LOST,
            KE.DROPPED: K.ABSENT,
        },
        K.LOST: {
            KE.WRITTEN: K.RESIDENT,
            KE.MOVE_STARTED: NEVER,
            KE.MOVE_ENDED: LATE,
            KE.MOVE_FAILED: LATE,
            KE.ENGINE_LOST: LATE,
            KE.DROPPED: K.ABSENT,
        },
    },
)

G, GE = EngineState, EngineEvent
ENGINE: Final[Machine[EngineState, EngineEvent]] = Machine(
    "engine",
    EngineState,
    EngineEvent,
    {
        G.READY: {
            GE.DRAIN_ORDERED: G.DRAINING,
            GE.EMPTIED: NEVER,
            GE.LOST: G.LOST,
        },
        G.DRAINING: {
            GE.DRAIN_ORDERED: LATE,
            GE.EMPTIED: G.DRAINED,
            GE.LOST: G.LOST,
        },
        G.DRAINED: {
            GE.DRAIN_ORDERED: LATE,
            GE.EMPTIED: NEVER,
            GE.LOST: G.LOST,
        },
        G.LOST: {event: LATE for event in GE},
    },
)

A, AE = ActionState, ActionEvent
ACTION: Final[Machine[ActionState, ActionEvent]] = Machine(
    "action",
    ActionState,
    ActionEvent,
    {
        A.WAITING: {
            AE.STARTED: A.RUNNING,
            AE.FINISHED: LATE,
            AE.HOST_LOST: NEVER,
            AE.CANCELLED: A.ENDED,
        },
        A.RUNNING: {
            AE.STARTED: NEVER,
            AE.FINISHED: A.ENDED,
            AE.HOST_LOST: A.WAITING,
            AE.CANCELLED: A.RUNNING,  # occupies its CPUs until the host reports its end
        },
        A.ENDED: {event: LATE for event in AE},
    },
)

MACHINES: Final[tuple[Machine[Any, Any], ...]] = (TRAJECTORY, KV, ENGINE, ACTION)
