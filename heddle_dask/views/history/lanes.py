"""The mutable records of the fold: a lane per trajectory, rows for engines, hosts and actions.

Compact, because a session may have 10,000 live trajectories: a segment of a lane takes 12 bytes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from heddle_dask.core.ids import ActionId, StepId, TrajectoryId
from heddle_dask.views.history.phases import ADMISSION, PHASES
from heddle_dask.views.history.reward_history import RewardTally

_PHASE_BITS: Final = 4
_PHASE_MASK: Final = (1 << _PHASE_BITS) - 1


@dataclass(slots=True, eq=False)
class EngineRow:
    """One engine incarnation, with sums over its steps and residents."""

    index: int
    seat: int
    engine_id: str
    slots: int
    tp_degree: int
    kv_capacity_tokens: int
    joined_s: float
    state: str = "ready"
    lost_s: float | None = None
    lost_because: str = ""
    expiring: bool = False
    generating: int = 0
    queued: int = 0
    resident_tokens: int = 0
    steps: int = 0
    generated_tokens: int = 0


@dataclass(slots=True, eq=False)
class HostRow:
    """A worker for actions, with the actions that run there (an ordered set)."""

    host_id: str
    pool: str
    cpus: int
    free_cpus: int
    running: dict[ActionId, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class OpenAction:
    lane: Lane
    label: str
    kind: str
    pool: str
    asks_api: bool = False
    service: str = ""
    host: str | None = None
    cpus: int = 0
    unawaited: bool = False


@dataclass(slots=True, eq=False)
class OpenMove:
    trajectory_id: TrajectoryId
    source: str
    target: str
    kind: str
    started_s: float


@dataclass(slots=True, eq=False)
class RunTotals:
    """What one of the runs that share a controller has come to."""

    submitted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    rewards: RewardTally = field(default_factory=RewardTally)


class Lane:
    """One trajectory: what it does now, its seconds by phase, and the points at which its timeline changes.

    Attributes
    ----------
    phase, since_s
        The phase that it is in, and since when.
    step, engine, generating
        Its open step (the identity of the attempt), the engine that has it, and whether it has started there.
    home, has_kv
        The engine with its context, and whether the engine has, or had, a KV cache of it.
    remaining_tokens, predicted_at_tokens
        The latest prediction, and the generated tokens from which it counts; nan before the first.
    """

    __slots__ = (
        "actions",
        "admitted_s",
        "after_step_tokens",
        "cause",
        "codes",
        "context_tokens",
        "domain",
        "ended_s",
        "engine",
        "first_q90_tokens",
        "first_tokens",
        "generated_tokens",
        "generating",
        "group_id",
        "has_kv",
        "home",
        "message",
        "moves",
        "omitted",
        "open_step_tokens",
        "parent",
        "phase",
        "predicted_at_tokens",
        "preemptions",
        "remaining_tokens",
        "requested_s",
        "resumed",
        "reward",
        "seconds",
        "since_s",
        "starts_s",
        "status",
        "step",
        "steps",
        "submitted_s",
        "trajectory_id",
    )

    def __init__(self, trajectory_id: TrajectoryId, group_id: str, domain: str, at: float) -> None:
        self.trajectory_id = trajectory_id
        self.group_id = group_id
        self.domain = domain
        self.parent = ""
        self.submitted_s = at
        self.admitted_s: float | None = None
        self.ended_s: float | None = None
        self.status = ""
        self.cause = ""
        self.message = ""  # one line about its cause
        self.reward: float | None = None
        self.phase = ADMISSION
        self.since_s = at
        self.requested_s = at
        self.step: StepId | None = None
        self.engine: EngineRow | None = None
        self.generating = False
        self.home: EngineRow | None = None
        self.has_kv = False
        self.actions: dict[ActionId, OpenAction] = {}
        self.context_tokens = 0
        self.generated_tokens = 0
        self.open_step_tokens = 0
        self.steps = 0
        self.resumed = False
        self.first_tokens = self.first_q90_tokens = self.after_step_tokens = float("nan")
        self.remaining_tokens = float("nan")
        self.predicted_at_tokens = 0
        self.preemptions = 0
        self.moves = 0
        self.seconds = [0.0] * len(PHASES)
        self.starts_s = array("d", (at,))
        self.codes = array("I", (ADMISSION,))
        self.omitted = 0

    def mark(self, at: float, phase: int, engine: EngineRow | None, most: int) -> None:
        """Begin a segment at that time; of several at one time the last one counts."""
        code = phase if engine is None else phase | (engine.index + 1) << _PHASE_BITS
        starts, codes = self.starts_s, self.codes
        if starts[-1] == at:
            codes[-1] = code
            return
        if codes[-1] == code:
            return
        starts.append(at)
        codes.append(code)
        if len(starts) > most:
            dropped = most // 4
            del starts[:dropped]
            del codes[:dropped]
            self.omitted += dropped

    def move_home(self, engine: EngineRow | None) -> None:
        if self.home is engine:
            return
        if self.home is not None:
            self.home.resident_tokens -= self.context_tokens
        if engine is not None:
            engine.resident_tokens += self.context_tokens
        self.home = engine

    def set_context(self, tokens: int) -> None:
        if self.home is not None:
            self.home.resident_tokens += tokens - self.context_tokens
        self.context_tokens = tokens

    def expected_remaining_tokens(self) -> float:
        """Predicted tokens still to come, those generated since subtracted; nan without a prediction."""
        left = self.remaining_tokens - (self.generated_tokens - self.predicted_at_tokens)
        return left if not left < 0.0 else 0.0

    def work_tokens(self) -> float:
        left = self.expected_remaining_tokens()
        return self.generated_tokens + left if left == left else float(self.generated_tokens)

    def segments(self, most: int) -> tuple[tuple[float, ...], tuple[int, ...], tuple[int, ...], int]:
        """The latest segments: starts, phases, engines, and the number of earlier ones."""
        first = max(0, len(self.starts_s) - most)
        codes = self.codes[first:]
        return (
            tuple(self.starts_s[first:]),
            tuple(code & _PHASE_MASK for code in codes),
            tuple((code >> _PHASE_BITS) - 1 for code in codes),
            self.omitted + first,
        )
