"""The controller's mutable records: trajectories, engines, actions, hosts. `State` owns them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from heddle_dask.core.commands import NO_WAITS, AbortStep, Command
from heddle_dask.core.engine_weights import WeightsOfEngine
from heddle_dask.core.errors import InvalidTransition
from heddle_dask.core.events import StepFinished
from heddle_dask.core.ids import ActionId, EngineId, HostId, PolicyVersion, RunId, TrajectoryId
from heddle_dask.core.nouns import (
    NORMAL,
    ActionRequest,
    ActionWaits,
    EngineDescription,
    HostDescription,
    Prediction,
    Priority,
    Quantile,
    StepRequest,
    TrajectorySpec,
)
from heddle_dask.core.resources import CPUS, GPUS, Resources, api_of
from heddle_dask.core.service_copies import HostGpus, ServiceCopy
from heddle_dask.core.transitions import (
    ACTION,
    ENGINE,
    KV,
    OVER,
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

HISTORY_LENGTH = 32
NO_RESOURCES = Resources()

EVICTED_SHARE = 0.5
EVICTED_LEAST_TOKENS = 256
"""A context was evicted if the engine lacks more than this share of its tokens, and more than this number. The last
block (16 tokens, on CPUs 128) is never cached."""


@dataclass(slots=True, eq=False)
class Trajectory:
    """The controller's record of a trajectory.

    Attributes
    ----------
    home
        Engine that holds its context, or to which it is assigned. None before the first placement, and after the loss
        of that engine once its last step there has reported. `Engine.residents` of the home contains this trajectory.
    counted_on, counted_tokens
        Engine whose `inflight_tokens` include the current step, and the number of these tokens.
    context_tokens
        Context tokens at the latest request, plus the tokens generated since.
    kept_on, kept_tokens
        Engine that had its context last, after a result or a move, and the tokens of that context.
    losses
        Number of times that the engine or the worker died while the current step was generating.
    preemptions, stopping
        Number of times the current step was preempted, and whether it is being preempted now.
    leaving
        Whether the current step was stopped because its engine drains, another run joins or another engine takes it,
        and has not reported.
    bound_for, was_taken
        The engine that has taken its step from the queue of another one, until the step is placed there; and whether
        any has taken the current step: only once, so that engines do not take it from each other.
    held
        Whether the current step is placed, but was not sent to its engine: runs share it.
    requested_at, admitted_at
        Time of the current step's request, and of the admission.
    resting_tools_s, tools_until
        Seconds in which tools have run since the latest step ended, overlapping calls counted once; the end of the last
        tool call.
    predicted_at_tokens, predicted_at_tools_s
        Generated tokens and tool seconds at the finished step from which the latest prediction counts.
    reserved_on, reserved_tokens
        Engine with a KV reservation between the admission and the placement of the first step, and its tokens.
    first_context_tokens
        Length of the first prompt as sent; 0 before the first step.
    open_step_tokens, step_tokens
        Tokens generated in the current step so far, over all its attempts, and in every finished step.
    observed_tokens
        Tokens added to its context after each finished step, up to the latest requested step.
    open_labels
        Labels of its open actions, in the order of their requests.
    sandboxes
        Names of its open sandboxes, in the order of their first actions.
    actions_done, tools_s
        Label, seconds and success of every finished action, and the sum of their seconds.
    policy_version
        Number of the version that samples it now, or last did; before that, the newest one on any engine.
    first_version
        The version that sampled its first token: while its first step runs, the one that its engine is known to have,
        which is no newer. Of a further branch, that of its trajectory. None before.
    kv_version
        The version under which its KV cache was computed; None before the first result.
    parent
        The trajectory of which it is a further branch; None: it is none.
    cancelled
        Why the driver was told to stop it (`staleness.STALE`, `REDUNDANT`); empty: it was not.
    history
        The latest transitions, for error messages.
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
    leaving: bool = False
    bound_for: EngineId | None = None
    was_taken: bool = False
    held: bool = False
    priority: Priority = NORMAL
    requested_at: float = 0.0
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
    sandboxes: list[str] = field(default_factory=list)
    actions_done: list[tuple[str, float, bool]] = field(default_factory=list)
    tools_s: float = 0.0
    policy_version: int = 0
    first_version: PolicyVersion | None = None
    kv_version: PolicyVersion | None = None
    parent: TrajectoryId | None = None
    cancelled: str = ""
    history: deque[tuple[float, TrajectoryEvent, TrajectoryState, TrajectoryState]] = field(
        default_factory=lambda: deque(maxlen=HISTORY_LENGTH)
    )

    @property
    def trajectory_id(self) -> TrajectoryId:
        """Shorthand for ``spec.trajectory_id``."""
        return self.spec.trajectory_id

    @property
    def has_begun(self) -> bool:
        """Whether its first token is sampled, or may be by now."""
        if self.parent is not None and self.first_version is not None:
            return True
        return self.generated_tokens > 0 or self.state is TrajectoryState.GENERATING

    @property
    def actions_open(self) -> int:
        """Number of actions that it waits for."""
        return len(self.open_labels)

    def remaining_tokens(self, quantile: Quantile = "median") -> float | None:
        """Predicted tokens still to be generated; None without a prediction.

        Tokens generated since the step from which the prediction counts are subtracted, down to 0.
        """
        if self.prediction is None:
            return None
        return max(0.0, self.prediction.quantile_tokens(quantile) - self.tokens_since_prediction)

    @property
    def is_homeless(self) -> bool:
        """Whether it lives on no engine and has no reservation: its engine was lost, or it has not been placed."""
        lives = self.state is not TrajectoryState.SUBMITTED and self.state not in OVER
        return lives and self.home is None and self.reserved_on is None

    @property
    def tokens_since_prediction(self) -> int:
        """Tokens generated after the finished step from which the latest prediction counts."""
        return self.generated_tokens - self.predicted_at_tokens

    @property
    def expected_tokens(self) -> int:
        """The median of `remaining_tokens` in whole tokens, for sums; 0 when unknown."""
        return int(self.remaining_tokens() or 0.0)

    def take_tokens(self, tokens: int, whole: bool) -> None:
        """Count the tokens of a step; `whole`: the step has ended, else it was preempted and will go on."""
        self.generated_tokens += tokens
        self.open_step_tokens += tokens
        if whole:
            self.steps_finished += 1
            self.step_tokens.append(self.open_step_tokens)
            self.open_step_tokens = 0

    def was_evicted(self, answer: StepFinished) -> bool:
        """Whether the engine once had this context and recomputed most of it for `answer`.

        False if the step was stopped before it began, if the prompt is no continuation (it is shorter), or if a change
        of weights has invalidated the KV cache.
        """
        if not answer.new_tokens or answer.engine_id != self.kept_on or self.context_tokens < self.kept_tokens:
            return False
        if self.kv_version is None or answer.policy_version != self.kv_version.number:
            return False
        lost_tokens = self.kept_tokens - answer.cached_tokens
        return lost_tokens > max(EVICTED_SHARE * self.kept_tokens, EVICTED_LEAST_TOKENS)

    def take_prediction(self, prediction: Prediction) -> None:
        """Set the latest prediction, which counts from the last finished step."""
        self.predicted_at_tokens = self.generated_tokens - self.open_step_tokens
        self.predicted_at_tools_s = self.tools_s
        self.prediction = prediction

    def take_action(self, label: str, seconds: float, ok: bool, at: float) -> None:
        """Count a finished action."""
        self.actions_done.append((label, seconds, ok))
        self.tools_s += seconds
        self.resting_tools_s += max(0.0, at - max(self.tools_until, at - seconds))
        self.tools_until = at

    def abort_step(self, reason: str) -> list[Command]:
        """The command that aborts its queued or generating step; no command if none was sent. Changes nothing."""
        step, engine_id = self.step, self.counted_on
        if step is None or engine_id is None or self.held:
            return []
        return [AbortStep(step.step_id, engine_id, reason)]

    def advance(self, event: TrajectoryEvent, at: float) -> bool:
        """Apply `event`; False when the event is stale and nothing changed."""
        try:
            after = TRAJECTORY.next_state(self.state, event, "")
        except InvalidTransition:  # raise it again with the history, which is formatted for errors only
            moments = [f"{when:.3f} {what.value}: {old.value} -> {new.value}" for when, what, old, new in self.history]
            told = f"trajectory {self.spec.trajectory_id}: " + "; ".join(moments)
            after = TRAJECTORY.next_state(self.state, event, told)
        if after is None:
            return False
        self.history.append((at, event, self.state, after))
        self.state = after
        return True

    def advance_kv(self, event: KvEvent) -> None:
        """Apply a KV event; a stale event changes nothing."""
        after = KV.next_state(self.kv, event, f"trajectory {self.trajectory_id}")
        if after is not None:
            self.kv = after


IDLE_S = 1.0
"""An engine without a trajectory for so long is idle: requests that are sent together have arrived by then."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine incarnation.

    Attributes
    ----------
    inflight_tokens
        Context tokens of the steps that are queued or generating here.
    resident_tokens
        Context tokens of all trajectories with this home, including those in tool calls.
    residents
        Trajectories with this home; a dict used as an ordered set.
    inflight
        Trajectories with a step queued or generating here.
    generating
        Number of `inflight` steps that have started.
    running
        Trajectories believed to hold a slot and not being preempted, in the order in which they got the slot.
    ahead
        Trajectories with a started step that waits in the engine's own queue for a slot.
    stopping
        Number of steps that are being preempted.
    idle_since
        When its latest step ended, or when it joined.
    taking
        Trajectories whose step it takes from the queue of another engine (a dict used as an ordered set).
    placed
        Steps placed here so far.
    held, held_of
        Number of `inflight` steps that were not sent here yet, since runs share the engine: in all, and by run.
    reserved, reserved_tokens
        Trajectories with a reservation here: admitted, first step not placed yet (a dict used as an ordered set); and
        the reserved KV tokens.
    expected_tokens
        Sum of `Trajectory.expected_tokens` over the residents.
    feeding
        Trajectories whose queued step, on another engine, will fetch its context from here; kept while it drains.
    ends_at, expiring
        When a draining engine will end, None when unknown; and whether that is in a moment.
    weights
        The version that it has, and the one that it is about to get.
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
    idle_since: float = 0.0
    taking: dict[TrajectoryId, None] = field(default_factory=dict)
    placed: int = 0
    held: int = 0
    held_of: dict[RunId, int] = field(default_factory=dict)
    reserved: dict[TrajectoryId, None] = field(default_factory=dict)
    reserved_tokens: float = 0.0
    expected_tokens: int = 0
    feeding: dict[TrajectoryId, None] = field(default_factory=dict)
    ends_at: float | None = None
    expiring: bool = False
    weights: WeightsOfEngine = field(init=False)

    def __post_init__(self) -> None:
        self.weights = WeightsOfEngine(PolicyVersion(self.spec.lineage, self.spec.policy_version))

    @property
    def version(self) -> PolicyVersion:
        """The version that it samples with, as far as it has reported."""
        return self.weights.installed

    @property
    def engine_id(self) -> EngineId:
        """Shorthand for ``spec.engine_id``."""
        return self.spec.engine_id

    def has_no_work(self, at: float) -> bool:
        """Whether it has had no trajectory for `IDLE_S`."""
        return not (self.residents or self.taking or self.reserved) and at - self.idle_since >= IDLE_S

    def occupy_slot(self, trajectory: Trajectory) -> None:
        """Give the trajectory's started step a free slot, or put it into the engine's own queue."""
        full = len(self.running) + self.stopping >= self.spec.slots
        (self.ahead if full else self.running)[trajectory.trajectory_id] = trajectory

    def free_slot(self, trajectory_id: TrajectoryId) -> None:
        """Take the trajectory's step, which has ended or is being preempted, off its slot or out of the queue."""
        self.running.pop(trajectory_id, None)
        self.ahead.pop(trajectory_id, None)

    def fill_slots(self) -> None:
        """Fill free slots from the engine's own queue in order of priority, as the engine does."""
        while self.ahead and len(self.running) + self.stopping < self.spec.slots:
            first = max(self.ahead.values(), key=lambda t: t.priority)
            self.running[first.trajectory_id] = self.ahead.pop(first.trajectory_id)

    def advance(self, event: EngineEvent) -> bool:
        """Apply `event`; False when the event is stale."""
        after = ENGINE.next_state(self.state, event, f"engine {self.engine_id}")
        if after is None:
            return False
        self.state = after
        return True


@dataclass(slots=True, eq=False)
class Action:
    """One tool or reward call.

    Attributes
    ----------
    host, resources, copy
        Set while it has resources: where, which, and its place on a chunk of GPUs (None: it uses none).
    granted_at, started_at
        When it got its resources, and when it started: between them its model service is loaded.
    waits
        For what it had waited when it got its GPUs.
    delayed_s
        Seconds for which it was held back before it waited for resources, as a repetition of a call.
    unawaited
        Whether its program no longer waits for it: it is not started again.
    host_fixed
        The only host that may run it, because its sandbox is there; None: every host of its pool. It may change while
        the action waits, when that host drains or is lost.
    least
        ``ResourceDemand.least``, computed once.
    """

    spec: ActionRequest
    number: int
    state: ActionState = ActionState.WAITING
    host: HostId | None = None
    resources: Resources = NO_RESOURCES
    losses: int = 0
    requested_at: float = 0.0
    started_at: float = 0.0
    delayed_s: float = 0.0
    unawaited: bool = False
    copy: ServiceCopy | None = None
    granted_at: float = 0.0
    host_fixed: HostId | None = None
    waits: ActionWaits = NO_WAITS
    least: Resources = field(init=False)

    def __post_init__(self) -> None:
        self.least = self.spec.demand.least

    def advance(self, event: ActionEvent) -> bool:
        """Apply `event`; False when the event is stale."""
        after = ACTION.next_state(self.state, event, f"action {self.spec.action_id}")
        if after is None:
            return False
        self.state = after
        return True


@dataclass(slots=True, eq=False)
class SandboxPlace:
    """Where the sandbox of a trajectory is.

    Attributes
    ----------
    trajectory_id
        The trajectory that made it; it is closed when that one ends.
    memory_bytes
        Memory of its host that is reserved for its life.
    host
        None while no host has the memory, or after its host has left: it is rebuilt elsewhere with its next action.
    reserved_bytes
        What it holds of the memory of `host`; 0 where that host announces no memory.
    open_actions
        Number of its actions that wait or run.
    closing
        Whether it is closed as soon as it has no action any more.
    """

    name: str
    trajectory_id: TrajectoryId
    number: int
    memory_bytes: int = 0
    host: HostId | None = None
    reserved_bytes: int = 0
    open_actions: int = 0
    closing: bool = False


@dataclass(slots=True, eq=False)
class Host:
    """A worker that runs actions.

    Attributes
    ----------
    free
        Amounts by resource that no action has and no sandbox reserves. GPUs with copies of services that nobody uses
        are free.
    gpus
        What is on its GPUs.
    sandboxes
        Names of the sandboxes that are placed here; a dict used as an ordered set.
    draining, released
        Whether it takes no more actions, and whether it is empty since then.
    """

    spec: HostDescription
    number: int
    free: dict[str, int] = field(init=False)
    gpus: HostGpus = field(init=False)
    running: dict[ActionId, None] = field(default_factory=dict)
    draining: bool = False
    released: bool = False
    sandboxes: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = dict(self.spec.resources)
        self.gpus = HostGpus(self.spec.host_id, self.spec.resources)

    def refresh_free_gpus(self) -> None:
        """Take the number of free GPUs from the chunks in use: actions of one copy share its chunk."""
        self.free[GPUS] = self.gpus.free_gpus

    @property
    def free_cpus(self) -> int:
        """CPUs that no running action uses."""
        return self.free.get(CPUS, 0)

    def fits(self, resources: Resources) -> bool:
        """Whether the resources that belong to hosts are free here."""
        return all(self.free.get(name, 0) >= amount for name, amount in resources if api_of(name) is None)

    def take(self, resources: Resources) -> None:
        """Take the resources that belong to hosts off the free ones; GPUs are taken by chunks."""
        for name, amount in resources:
            if api_of(name) is None and name != GPUS:
                self.free[name] = self.free.get(name, 0) - amount

    def give_back(self, resources: Resources) -> None:
        """The inverse of `take`."""
        for name, amount in resources:
            if api_of(name) is None and name != GPUS:
                self.free[name] = self.free.get(name, 0) + amount
