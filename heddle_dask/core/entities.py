"""The controller's mutable records: trajectories, engines, actions, hosts. `State` owns them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from heddle_dask.core.commands import AbortStep, Command
from heddle_dask.core.errors import InvalidTransition
from heddle_dask.core.events import StepFinished
from heddle_dask.core.ids import ActionId, EngineId, HostId, TrajectoryId
from heddle_dask.core.nouns import (
    ActionRequest,
    EngineDescription,
    HostDescription,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.prediction import Prediction, Quantile
from heddle_dask.core.priority import NORMAL, Priority
from heddle_dask.core.transitions import (
    ACTION,
    ENGINE,
    KV,
    TRAJECTORY,
    ActionEvent,
    ActionState,
    EngineEvent,
    EngineState,
    KvEvent,
    KvState,
    TrajectoryEvent,
    TrajectoryState,
)

STORY_LENGTH = 32

EVICTED_SHARE = 0.5
EVICTED_LEAST_TOKENS = 256
"""Whoever lacks more than both has lost a context. The last block is never cached: of 16 tokens, of 128 on CPUs."""


@dataclass(slots=True, eq=False)
class Trajectory:
    """One trajectory as the controller sees it.

    Attributes
    ----------
    home
        Engine that holds its context, or that it is assigned to. None before the first placement and after that
        engine was lost and the last step there has reported. `Engine.residents` of the home lists this trajectory.
    counted_on, counted_tokens
        Engine whose `inflight_tokens` counts the current step, and with how many tokens.
    context_tokens
        Tokens in front of the model at the latest request, plus what was generated since.
    kept_on, kept_tokens
        Engine that had its context last, by an answer or a move, and how much of it.
    losses
        How often the current step was lost together with its worker.
    preemptions, stopping
        How often the current step was stopped for another, and whether it is being stopped now.
    priority
        Of the current step: larger runs first.
    requested_at, rested_at, admitted_at
        When the current step was asked for, when the latest one ended, and when the trajectory was admitted.
    resting_tools_s, tools_until
        Seconds in which tools have run since the latest step ended, those side by side counted once; when the last of
        all ended.
    prediction
        The latest prediction; None before the first.
    predicted_at_tokens, predicted_at_tools_s
        Tokens that it had generated, and seconds of tools that it had behind it, at the finished step after which the
        latest prediction counts.
    reserved_on, reserved_tokens
        Engine that keeps KV memory for it between its admission and the placement of its first step, and how much.
    moves
        How many moves of its context were started.
    first_context_tokens
        Length of the first prompt as it was sent; 0 before the first step.
    open_step_tokens, step_tokens
        Generated tokens of the current step's parts so far, and of every finished step.
    observed_tokens
        What was added to its context behind each finished step, up to the step that was asked for last.
    open_labels
        Labels of the actions that it waits for, in the order in which it asked.
    actions_done, tools_s
        Label, seconds and success of every finished action, and the seconds of all.
    story
        The latest transitions, for errors.
    """

    spec: TrajectorySpec
    number: int
    state: TrajectoryState = TrajectoryState.SUBMITTED
    kv: KvState = KvState.ABSENT
    home: EngineId | None = None
    step: StepRequest | None = None
    counted_on: EngineId | None = None
    counted_tokens: int = 0
    context_tokens: int = 0
    kept_on: EngineId | None = None
    kept_tokens: int = 0
    generated_tokens: int = 0
    steps_finished: int = 0
    losses: int = 0
    preemptions: int = 0
    stopping: bool = False
    priority: Priority = NORMAL
    requested_at: float = 0.0
    rested_at: float = 0.0
    resting_tools_s: float = 0.0
    tools_until: float = 0.0
    admitted_at: float = 0.0
    prediction: Prediction | None = None
    predicted_at_tokens: int = 0
    predicted_at_tools_s: float = 0.0
    reserved_on: EngineId | None = None
    reserved_tokens: float = 0.0
    moves: int = 0
    first_context_tokens: int = 0
    open_step_tokens: int = 0
    step_tokens: list[int] = field(default_factory=list)
    observed_tokens: list[int] = field(default_factory=list)
    open_labels: list[str] = field(default_factory=list)
    actions_done: list[tuple[str, float, bool]] = field(default_factory=list)
    tools_s: float = 0.0
    policy_version: int = 0
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def trajectory_id(self) -> TrajectoryId:
        """Shorthand for ``spec.trajectory_id``."""
        return self.spec.trajectory_id

    @property
    def actions_open(self) -> int:
        """How many actions it waits for."""
        return len(self.open_labels)

    def remaining_tokens(self, quantile: Quantile = "median") -> float | None:
        """Tokens still to be generated, as predicted; None where no prediction exists.

        Tokens generated since the prediction are subtracted. A trajectory that has outlived its prediction has 0 left.
        """
        if self.prediction is None:
            return None
        return max(0.0, self.prediction.quantile_tokens(quantile) - self.tokens_since_prediction)

    @property
    def tokens_since_prediction(self) -> int:
        """Tokens generated after the finished step from which the latest prediction counts."""
        return self.generated_tokens - self.predicted_at_tokens

    @property
    def expected_tokens(self) -> int:
        """The median of `remaining_tokens` in whole tokens, for sums; 0 where it is unknown."""
        return int(self.remaining_tokens() or 0.0)

    def take_tokens(self, tokens: int, whole: bool) -> None:
        """Count what a step has generated; `whole`: the step has ended, else it was stopped and will go on."""
        self.generated_tokens += tokens
        self.open_step_tokens += tokens
        if whole:
            self.steps_finished += 1
            self.step_tokens.append(self.open_step_tokens)
            self.open_step_tokens = 0

    def was_evicted(self, answer: StepFinished) -> bool:
        """Whether the engine had this context, and has computed most of it anew for `answer`.

        Not where it was stopped before it began, where the prompt is not a continuation (it is shorter), or where other
        weights have made the KV cache worthless.
        """
        if (
            not answer.new_tokens
            or answer.engine_id != self.kept_on
            or self.context_tokens < self.kept_tokens
        ):
            return False
        if answer.policy_version != self.policy_version:
            return False
        lost_tokens = self.kept_tokens - answer.cached_tokens
        return lost_tokens > max(EVICTED_SHARE * self.kept_tokens, EVICTED_LEAST_TOKENS)

    def take_prediction(self, prediction: Prediction) -> None:
        """Keep what is predicted to remain after the last finished step."""
        self.predicted_at_tokens = self.generated_tokens - self.open_step_tokens
        self.predicted_at_tools_s = self.tools_s
        self.prediction = prediction

    def take_action(self, label: str, seconds: float, ok: bool, at: float) -> None:
        """One of its actions has ended."""
        self.actions_done.append((label, seconds, ok))
        self.tools_s += seconds
        self.resting_tools_s += max(0.0, at - max(self.tools_until, at - seconds))
        self.tools_until = at

    def abort_step(self, reason: str) -> list[Command]:
        """The order to stop its current step, where one is queued or generating; changes nothing."""
        step, engine_id = self.step, self.counted_on
        if step is None or engine_id is None:
            return []
        return [AbortStep(step.step_id, engine_id, reason)]

    def advance(self, event: TrajectoryEvent, at: float) -> bool:
        """Take `event`; False when it is a late arrival and nothing changed."""
        try:
            after = TRAJECTORY.next_state(self.state, event, "")
        except InvalidTransition:  # once more, with its story: only an error pays for telling it
            told = f"trajectory {self.spec.trajectory_id}: " + "; ".join(self.story)
            after = TRAJECTORY.next_state(self.state, event, told)
        if after is None:
            return False
        self.story.append(f"{at:.3f} {event.value}: {self.state.value} -> {after.value}")
        self.state = after
        return True

    def advance_kv(self, event: KvEvent) -> None:
        """Take a KV event; late arrivals change nothing."""
        after = KV.next_state(self.kv, event, f"trajectory {self.trajectory_id}")
        if after is not None:
            self.kv = after


@dataclass(slots=True, eq=False)
class Engine:
    """One engine incarnation.

    Attributes
    ----------
    inflight_tokens
        Context tokens of the steps that are queued or generating here.
    resident_tokens
        Context tokens of all trajectories whose home this is, those in tools included.
    residents
        Those trajectories; a dict used as an ordered set.
    inflight
        Trajectories with a step queued or generating here.
    generating
        How many of them have started.
    running
        Those that are taken to hold a slot and are not being stopped, in the order in which they got it.
    ahead
        Those that have started and wait in the engine itself for a slot that another one leaves.
    stopping
        How many of them are being stopped for others.
    placed
        Steps placed here so far.
    reserved, reserved_tokens
        Trajectories admitted to this engine whose first step is not placed yet, a dict used as an ordered set; KV
        tokens that are kept for them.
    expected_tokens
        Sum of `Trajectory.expected_tokens` over the residents.
    """

    spec: EngineDescription
    number: int
    state: EngineState = EngineState.READY
    inflight_tokens: int = 0
    resident_tokens: int = 0
    residents: dict[TrajectoryId, None] = field(default_factory=dict)
    inflight: dict[TrajectoryId, None] = field(default_factory=dict)
    generating: int = 0
    running: dict[TrajectoryId, Trajectory] = field(default_factory=dict, repr=False)
    ahead: dict[TrajectoryId, Trajectory] = field(default_factory=dict, repr=False)
    stopping: int = 0
    placed: int = 0
    reserved: dict[TrajectoryId, None] = field(default_factory=dict)
    reserved_tokens: float = 0.0
    expected_tokens: int = 0

    @property
    def engine_id(self) -> EngineId:
        """Shorthand for ``spec.engine_id``."""
        return self.spec.engine_id

    def seat(self, trajectory: Trajectory) -> None:
        """Its step has started: it holds a slot if one is free, else it waits in the engine."""
        full = len(self.running) + self.stopping >= self.spec.slots
        (self.ahead if full else self.running)[trajectory.trajectory_id] = trajectory

    def unseat(self, trajectory_id: TrajectoryId) -> None:
        """Its step has ended, or is being stopped."""
        self.running.pop(trajectory_id, None)
        self.ahead.pop(trajectory_id, None)

    def fill_seats(self) -> None:
        """Give the slots that are free to those of highest priority among the waiting, as the engine does."""
        while self.ahead and len(self.running) + self.stopping < self.spec.slots:
            first = max(self.ahead.values(), key=lambda t: t.priority)
            self.running[first.trajectory_id] = self.ahead.pop(first.trajectory_id)

    def advance(self, event: EngineEvent) -> bool:
        """Take `event`; False when it is a late arrival."""
        after = ENGINE.next_state(self.state, event, f"engine {self.engine_id}")
        if after is None:
            return False
        self.state = after
        return True


@dataclass(slots=True, eq=False)
class Action:
    """One tool or reward call. `host` and `cpus` are set while it runs."""

    spec: ActionRequest
    number: int
    state: ActionState = ActionState.WAITING
    host: HostId | None = None
    cpus: int = 0
    losses: int = 0

    def advance(self, event: ActionEvent) -> bool:
        """Take `event`; False when it is a late arrival."""
        after = ACTION.next_state(self.state, event, f"action {self.spec.action_id}")
        if after is None:
            return False
        self.state = after
        return True


@dataclass(slots=True, eq=False)
class Host:
    """A worker that runs actions; `free_cpus` is what running actions leave."""

    spec: HostDescription
    number: int
    free_cpus: int
    running: dict[ActionId, None] = field(default_factory=dict)
