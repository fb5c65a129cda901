"""Small state machines and their coupling. Everything that affects a transition is in this file.

They are several and not one because they overlap: a trajectory acts while its KV cache moves. Every machine is a
table with a row per state and a column per event. A cell is the next state, `LATE` (the event is stale: ignored and
counted), or `NEVER` (the event is impossible: a bug, raised with the history).

The cells apply to the *current* attempt at the *current* engine. `Controller` filters messages of superseded attempts
before, because their identity distinguishes them, not the state.

Coupling, in one place:

1. An engine that is lost strands its queued and generating trajectories: `STRANDED`, hence WAITING.
2. An engine that is lost loses the KV caches on it: KV `ENGINE_LOST`.
3. A step that finishes leaves its KV on its engine: KV `WRITTEN`; not when that engine is lost.
4. A trajectory whose program ends frees its KV: KV `DROPPED`; its waiting actions are `CANCELLED`. Those of its reward
   follow; they are cancelled when the trajectory ends.
5. A trajectory whose KV is MOVING is not dispatched before the move ends.
6. An engine that drains gives up its residents: their KV moves, or is left behind (KV `DROPPED`) when the move fails or
   the engine is about to end. Without residents and moves, and once no queued step has to fetch its context from it,
   it is DRAINED.
7. An action that needs a model service is LOADING until the copy that it was granted is RESIDENT; a failed load puts it
   back to WAITING. A copy is evicted only while no action runs or waits on it.
8. An engine is LOADING while it has joined and its weights are behind the version that is wanted. It is READY when it
   has installed that one or a newer one, or, where those cannot be fetched, the newest one of the lineage that can.
9. An engine installs only while no move of a context uses it, and no move begins there meanwhile. Its steps stay and go
   on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    SCORING = "scoring"  # its program has ended: it holds no engine, and its reward is computed
    ENDED = "ended"


# States in which the program has ended.
OVER: Final = frozenset({TrajectoryState.SCORING, TrajectoryState.ENDED})
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
    PROGRAM_ENDED = "program ended"
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
    """Whether an engine takes steps. An engine joins when it answers, so there is no STARTING."""

    READY = "ready"
    LOADING = "loading"  # it has joined, and loads newer weights before its first step
    DRAINING = "draining"
    DRAINED = "drained"  # empty after a drain
    LOST = "lost"


class EngineEvent(Enum):
    """Events of the engine machine."""

    JOINED_BEHIND = "joined behind"
    LOADED = "loaded"
    DRAIN_ORDERED = "drain ordered"
    EMPTIED = "emptied"
    LOST = "lost"


class ActionState(Enum):
    """State of an action."""

    WAITING = "waiting"
    LOADING = "loading"  # it has its GPUs, and waits for its model service to be resident there
    RUNNING = "running"
    ENDED = "ended"


class ActionEvent(Enum):
    """Events of the action machine."""

    GRANTED = "granted"
    LOAD_FAILED = "load failed"
    STARTED = "started"
    FINISHED = "finished"
    HOST_LOST = "host lost"
    CANCELLED = "cancelled"


class BreakerState(Enum):
    """State of the circuit breaker of an API."""

    CLOSED = "closed"  # calls pass
    OPEN = "open"  # no call passes
    HALF_OPEN = "half-open"  # one call passes, as a probe


class BreakerEvent(Enum):
    """Events of the breaker machine; those of calls are of the probe while it is half-open."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    FAILED_TOO_OFTEN = "failed too often"
    COOLED = "cooled"


class CopyState(Enum):
    """State of one copy of a model service on a chunk of GPUs of one host."""

    CLEARING = "clearing"  # wanted; other copies leave the memory of these GPUs first
    LOADING = "loading"
    RESIDENT = "resident"
    EVICTING = "evicting"
    LOST = "lost"  # its process died; some of its requests have not reported
    GONE = "gone"


class CopyEvent(Enum):
    """Events of the machine of copies."""

    ROOM_MADE = "room made"
    LOADED = "loaded"
    LOAD_FAILED = "load failed"
    EVICT_ORDERED = "evict ordered"
    EVICTED = "evicted"
    LOST = "lost"
    UNUSED = "unused"


class WeightsState(Enum):
    """What an engine does about newer weights than it has."""

    SETTLED = "settled"  # nothing
    FETCHING = "fetching"
    BACKING_OFF = "backing off"  # a fetch or an installation has failed; the fetch is repeated after a while
    FETCHED = "fetched"  # they are verified and at hand
    INSTALLING = "installing"
    FAILED = "failed"  # it keeps what it has until newer ones are published


class WeightsEvent(Enum):
    """Events of the machine of an engine's weights."""

    FETCH_ORDERED = "fetch ordered"
    FETCHED = "fetched"
    FETCH_FAILED = "fetch failed"
    GIVEN_UP = "given up"
    INSTALL_ORDERED = "install ordered"
    INSTALLED = "installed"
    INSTALL_FAILED = "install failed"


class Mark(Enum):
    """Table cells that are not a state."""

    LATE = "late"
    NEVER = "never"


LATE: Final = Mark.LATE
NEVER: Final = Mark.NEVER

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Machine(Generic[S, E]):
    """A named transition table. What a state does not name is late, or cannot happen.

    Parameters
    ----------
    late
        Events that come late where they change nothing; the others can then not happen.
    rows
        What happens in a state, by event.
    over
        States in which every event is late.
    """

    def __init__(
        self,
        name: str,
        states: type[S],
        events: type[E],
        *,
        late: Collection[E],
        rows: Mapping[S, Mapping[E, S | Mark]],
        over: Collection[S] = (),
    ) -> None:
        self.name = name
        otherwise: dict[E, S | Mark] = {event: LATE if event in late else NEVER for event in events}
        self.rows = {
            state: dict.fromkeys(events, LATE) if state in over else {**otherwise, **rows[state]} for state in states
        }

    def next_state(self, state: S, event: E, history: str = "") -> S | None:
        """The state after `event`, or None when the event is stale and to be ignored.

        Raises
        ------
        InvalidTransition
            The cell is `NEVER`; the message contains `history`.
        """
        cell = self.rows[state][event]
        if cell is NEVER:
            raise InvalidTransition(f"{self.name}: '{event.value}' cannot happen in state '{state.value}'; {history}")
        return None if isinstance(cell, Mark) else cell


T, TE = TrajectoryState, TrajectoryEvent
TRAJECTORY: Final[Machine[TrajectoryState, TrajectoryEvent]] = Machine(
    "trajectory",
    TrajectoryState,
    TrajectoryEvent,
    late=(TE.STARTED, TE.STEP_ENDED),
    rows={
        T.SUBMITTED: {
            TE.ADMITTED: T.THINKING,
            TE.STARTED: NEVER,
            TE.STEP_ENDED: NEVER,
            TE.ENDED: T.ENDED,
        },
        T.THINKING: {
            TE.STEP_REQUESTED: T.WAITING,
            TE.ACTION_REQUESTED: T.ACTING,
            TE.LAST_ACTION_ENDED: T.THINKING,  # of an action concurrent with a step
            TE.PROGRAM_ENDED: T.SCORING,
            TE.ENDED: T.ENDED,
        },
        T.WAITING: {
            TE.PLACED: T.QUEUED,
            TE.ACTION_REQUESTED: T.WAITING,
            TE.LAST_ACTION_ENDED: T.WAITING,
            TE.PROGRAM_ENDED: T.SCORING,
            TE.ENDED: T.ENDED,
        },
        T.QUEUED: {
            TE.PLACED: T.QUEUED,
            TE.STARTED: T.GENERATING,
            TE.STEP_ENDED: T.THINKING,
            TE.STRANDED: T.WAITING,
            TE.ACTION_REQUESTED: T.QUEUED,
            TE.LAST_ACTION_ENDED: T.QUEUED,
            TE.PROGRAM_ENDED: T.SCORING,
            TE.ENDED: T.ENDED,
        },
        T.GENERATING: {
            TE.STEP_ENDED: T.THINKING,
            TE.STRANDED: T.WAITING,
            TE.ACTION_REQUESTED: T.GENERATING,
            TE.LAST_ACTION_ENDED: T.GENERATING,
            TE.PROGRAM_ENDED: T.SCORING,
            TE.ENDED: T.ENDED,
        },
        T.ACTING: {
            TE.STEP_REQUESTED: T.WAITING,
            TE.ACTION_REQUESTED: T.ACTING,
            TE.LAST_ACTION_ENDED: T.THINKING,
            TE.PROGRAM_ENDED: T.SCORING,
            TE.ENDED: T.ENDED,
        },
        T.SCORING: {
            TE.STEP_REQUESTED: LATE,
            TE.ACTION_REQUESTED: T.SCORING,
            TE.LAST_ACTION_ENDED: T.SCORING,
            TE.PROGRAM_ENDED: LATE,
            TE.ENDED: T.ENDED,
        },
    },
    over=(T.ENDED,),
)

K, KE = KvState, KvEvent
KV: Final[Machine[KvState, KvEvent]] = Machine(
    "kv cache",
    KvState,
    KvEvent,
    late=(KE.MOVE_ENDED, KE.MOVE_FAILED, KE.ENGINE_LOST, KE.DROPPED),
    rows={
        K.ABSENT: {
            KE.WRITTEN: K.RESIDENT,
        },
        K.RESIDENT: {
            KE.WRITTEN: K.RESIDENT,
            KE.MOVE_STARTED: K.MOVING,
            KE.ENGINE_LOST: K.LOST,
            KE.DROPPED: K.ABSENT,
        },
        K.MOVING: {
            KE.MOVE_ENDED: K.RESIDENT,
            KE.MOVE_FAILED: K.RESIDENT,
            KE.ENGINE_LOST: K.LOST,
            KE.DROPPED: K.ABSENT,
        },
        K.LOST: {
            KE.WRITTEN: K.RESIDENT,
            KE.DROPPED: K.ABSENT,
        },
    },
)

G, GE = EngineState, EngineEvent
ENGINE: Final[Machine[EngineState, EngineEvent]] = Machine(
    "engine",
    EngineState,
    EngineEvent,
    late=(GE.DRAIN_ORDERED,),
    rows={
        G.READY: {
            GE.JOINED_BEHIND: G.LOADING,
            GE.DRAIN_ORDERED: G.DRAINING,
            GE.LOST: G.LOST,
        },
        G.LOADING: {
            GE.LOADED: G.READY,
            GE.DRAIN_ORDERED: G.DRAINING,
            GE.LOST: G.LOST,
        },
        G.DRAINING: {
            GE.EMPTIED: G.DRAINED,
            GE.LOST: G.LOST,
        },
        G.DRAINED: {
            GE.LOST: G.LOST,
        },
    },
    over=(G.LOST,),
)

A, AE = ActionState, ActionEvent
ACTION: Final[Machine[ActionState, ActionEvent]] = Machine(
    "action",
    ActionState,
    ActionEvent,
    late=(AE.FINISHED,),
    rows={
        A.WAITING: {
            AE.GRANTED: A.LOADING,
            AE.STARTED: A.RUNNING,
            AE.CANCELLED: A.ENDED,
        },
        A.LOADING: {
            AE.LOAD_FAILED: A.WAITING,
            AE.STARTED: A.RUNNING,
            AE.HOST_LOST: A.WAITING,
            AE.CANCELLED: A.ENDED,
        },
        A.RUNNING: {
            AE.FINISHED: A.ENDED,
            AE.HOST_LOST: A.WAITING,
            AE.CANCELLED: A.RUNNING,  # occupies its CPUs until the host reports its end
        },
    },
    over=(A.ENDED,),
)

B, BE = BreakerState, BreakerEvent
BREAKER: Final[Machine[BreakerState, BreakerEvent]] = Machine(
    "circuit breaker",
    BreakerState,
    BreakerEvent,
    late=(BE.SUCCEEDED, BE.FAILED, BE.FAILED_TOO_OFTEN),
    rows={
        B.CLOSED: {
            BE.SUCCEEDED: B.CLOSED,
            BE.FAILED: B.CLOSED,
            BE.FAILED_TOO_OFTEN: B.OPEN,
        },
        B.OPEN: {
            BE.COOLED: B.HALF_OPEN,
            # a success is of a call that began before
        },
        B.HALF_OPEN: {
            BE.SUCCEEDED: B.CLOSED,
            BE.FAILED: B.OPEN,
            BE.FAILED_TOO_OFTEN: B.OPEN,
        },
    },
)

C, CE = CopyState, CopyEvent
COPY: Final[Machine[CopyState, CopyEvent]] = Machine(
    "service copy",
    CopyState,
    CopyEvent,
    late=(CE.LOADED, CE.LOAD_FAILED, CE.EVICTED, CE.LOST),
    rows={
        C.CLEARING: {
            CE.ROOM_MADE: C.LOADING,
            CE.UNUSED: C.GONE,
        },
        C.LOADING: {
            CE.LOADED: C.RESIDENT,
            CE.LOAD_FAILED: C.GONE,
            # its death while it is loaded is a failed load
        },
        C.RESIDENT: {
            CE.EVICT_ORDERED: C.EVICTING,
            CE.LOST: C.LOST,
            # unused it stays cached
        },
        C.EVICTING: {
            CE.EVICTED: C.GONE,
            # when it dies, the answer to the order follows all the same
        },
        C.LOST: {
            CE.UNUSED: C.GONE,
        },
    },
    over=(C.GONE,),
)

W, WE = WeightsState, WeightsEvent
WEIGHTS: Final[Machine[WeightsState, WeightsEvent]] = Machine(
    "weights of an engine",
    WeightsState,
    WeightsEvent,
    late=(WE.FETCHED, WE.FETCH_FAILED, WE.INSTALLED, WE.INSTALL_FAILED),
    rows={
        W.SETTLED: {
            WE.FETCH_ORDERED: W.FETCHING,
        },
        W.FETCHING: {
            WE.FETCH_ORDERED: W.FETCHING,  # of newer ones
            WE.FETCHED: W.FETCHED,
            WE.FETCH_FAILED: W.BACKING_OFF,
        },
        W.BACKING_OFF: {
            WE.FETCH_ORDERED: W.FETCHING,
            WE.GIVEN_UP: W.FAILED,
        },
        W.FETCHED: {
            WE.FETCH_ORDERED: W.FETCHING,
            WE.INSTALL_ORDERED: W.INSTALLING,
        },
        W.INSTALLING: {
            WE.INSTALLED: W.SETTLED,
            WE.INSTALL_FAILED: W.BACKING_OFF,
            # newer ones wait for the end of the installation
        },
        W.FAILED: {
            WE.FETCH_ORDERED: W.FETCHING,
        },
    },
)

MACHINES: Final[tuple[Machine[Any, Any], ...]] = (TRAJECTORY, KV, ENGINE, WEIGHTS, ACTION, COPY, BREAKER)
