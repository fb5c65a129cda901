"""The history of a session, folded from its events and commands: live as they happen, or from a stored journal.

It needs nothing but the pairs ``(event, commands)`` in their order, so that the page, the metrics, the terminal and
the report of a stored run count alike. Constant time per pair, bounded memory (`HistoryLimits`).

It follows the controller without asking it: an event that the controller ignores as stale changes nothing here either.
A test compares both after every event.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.commands import PREEMPTED_FOR, REQUEUED
from heddle_dask.core.ids import RunId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.core.run_record import plain_name
from heddle_dask.views.history.action_history import ActionHistory
from heddle_dask.views.history.bounded import FailureTally, HistoryLimits, LengthSample, ThinnedSeries
from heddle_dask.views.history.engine_history import EngineHistory
from heddle_dask.views.history.lanes import Lane, RunTotals
from heddle_dask.views.history.phases import ADMISSION, DRIVER, GENERATING, LLM_QUEUE, MIGRATION, PHASES
from heddle_dask.views.history.reward_history import RewardTally
from heddle_dask.views.history.run_snapshot import LengthPair
from heddle_dask.views.history.training_history import TrainingHistory

TOTALS: Final = (
    "live",
    "ended",
    "steps",
    "generated_tokens",
    "slots",
    "resident_tokens",
    "kv_capacity_tokens",
    "moves",
    "preemptions",
)
"""Columns of the series beside the phases and the engines."""


class RunHistory:
    """A fold over the events of one session.

    Attributes
    ----------
    events
        Number of pairs taken: the offset in the journal to which everything here belongs.
    lanes
        Trajectories that have not ended, in the order of their submission.
    ended_lanes
        Ended ones, in the order of their end.
    by_phase, phase_seconds
        Number of lanes in each phase, and seconds of all lanes in each phase up to their latest change.
    """

    def __init__(self, limits: HistoryLimits | None = None) -> None:
        self.limits = limits or HistoryLimits()
        self.events = 0
        self.at_s = 0.0
        self.lanes: dict[TrajectoryId, Lane] = {}
        self.ended_lanes: deque[Lane] = deque(maxlen=self.limits.ended)
        self.by_phase = [0] * len(PHASES)
        self.phase_seconds = [0.0] * len(PHASES)
        self.ended: Counter[str] = Counter()
        self.ended_count = 0
        self.submitted = 0
        self.steps = 0
        self.generated_tokens = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.preemptions = 0
        self._requeues = 0
        self.rewards = RewardTally()
        self.runs: dict[RunId, RunTotals] = {}
        self.failures = FailureTally()
        self.lengths = LengthSample(self.limits.lengths)
        self.series: ThinnedSeries[Any] = ThinnedSeries(self.limits.samples, self.limits.sample_interval_s)
        for total in (*TOTALS, *range(len(PHASES))):
            self.series.add_column(total)
        self.engines = EngineHistory(self.lanes, self.enter, self.series, self.failures)
        self.actions = ActionHistory(self.lanes, self.enter, self.engines.leave, self.failures)
        self.training = TrainingHistory(self.failures)
        engines, actions, training = self.engines, self.actions, self.training
        self._events: dict[type, Callable[[Any], None]] = {
            ev.TrajectorySubmitted: self._submitted,
            ev.TrajectoryForked: self._forked,
            ev.ProgramEnded: self._program_ended,
            ev.TrajectoryEnded: self._ended,
            ev.RunEnded: self._run_ended,
            ev.StepRequested: self._step_requested,
            ev.StepStarted: self._step_started,
            ev.StepFinished: self._step_finished,
            ev.StepFailed: self._step_failed,
            ev.StepCancelled: self._step_cancelled,
            ev.PredictionMade: self._predicted,
            ev.MoveEnded: engines.move_ended,
            ev.EngineJoined: self._engine_joined,
            ev.EngineLost: self._engine_lost,
            ev.EngineDraining: engines.draining,
            ev.EngineExpiring: engines.expiring,
            ev.ActionRequested: actions.requested,
            ev.ActionFinished: actions.finished,
            ev.ActionCancelled: actions.cancelled,
            ev.HostJoined: actions.host_joined,
            ev.HostLost: actions.host_lost,
            ev.ServiceLoaded: actions.service_loaded,
            ev.OptimizerStepEnded: training.step_ended,
            ev.WeightsPublished: training.published,
            ev.WeightsFetched: training.fetched,
            ev.WeightsInstalled: training.installed,
        }
        self._commands: dict[type, Callable[[Any, float], None]] = {
            cmd.AdmitTrajectory: self._admitted,
            cmd.StartStep: self._step_placed,
            cmd.AbortStep: self._step_aborted,
            cmd.GiveUpStep: self._step_given_up,
            cmd.MoveContext: engines.move_started,
            cmd.ReleaseEngine: engines.drained,
            cmd.RunAction: actions.started,
            cmd.GiveUpAction: actions.given_up,
            cmd.LoadService: actions.service_loads,
        }

    def take(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        self.events += 1
        self.at_s = at = event.at
        take_event = self._events.get(type(event))
        if take_event is not None:
            take_event(event)
        for command in commands:
            take_command = self._commands.get(type(command))
            if take_command is not None:
                take_command(command, at)
        if at >= self.series.next_s:
            self._sample(at)

    def tell_end(self, trajectory_id: TrajectoryId, cause: str, reward: float | None, message: str = "") -> None:
        """Why the trajectory is about to end, and its reward, which its event does not tell."""
        lane = self.lanes.get(trajectory_id)
        if lane is not None:
            lane.cause, lane.reward, lane.message = cause, reward, message

    @property
    def live(self) -> int:
        """Trajectories that are admitted and have not ended."""
        return len(self.lanes) - self.by_phase[ADMISSION]

    def _engine_joined(self, event: ev.EngineJoined) -> None:
        self.engines.joined(event)
        self.training.joined(event)

    def _engine_lost(self, event: ev.EngineLost) -> None:
        self.engines.lost(event)
        self.training.lost(event)

    # -- lanes -------------------------------------------------------------------------------------

    def enter(self, lane: Lane, phase: int, at: float) -> None:
        before = lane.phase
        # Journals of earlier versions have events that are a few microseconds before the one before them.
        at = max(at, lane.since_s)
        if before != phase:
            spent = at - lane.since_s
            lane.seconds[before] += spent
            self.phase_seconds[before] += spent
            self.by_phase[before] -= 1
            self.by_phase[phase] += 1
            lane.phase = phase
            lane.since_s = at
        lane.mark(at, phase, lane.engine, self.limits.segments)

    def _submitted(self, event: ev.TrajectorySubmitted) -> None:
        self._begin_lane(event.trajectory, event.at)

    def _begin_lane(self, spec: TrajectorySpec, at: float) -> Lane:
        lane = Lane(spec.trajectory_id, spec.group_id, spec.domain, at)
        lane.context_tokens = spec.prompt_tokens
        lane.resumed = spec.resumed_tokens > 0
        self.lanes[spec.trajectory_id] = lane
        self.by_phase[ADMISSION] += 1
        self.submitted += 1
        self.run_of(spec.trajectory_id).submitted += 1
        return lane

    def run_of(self, trajectory_id: TrajectoryId) -> RunTotals:
        return self.runs.setdefault(plain_name(trajectory_id)[0], RunTotals())

    def _forked(self, event: ev.TrajectoryForked) -> None:
        if event.parent not in self.lanes:
            return
        lane = self._begin_lane(event.trajectory, event.at)
        lane.parent = event.parent
        lane.admitted_s = event.at
        self.enter(lane, DRIVER, event.at)

    def _admitted(self, command: cmd.AdmitTrajectory, at: float) -> None:
        lane = self.lanes.get(command.trajectory_id)
        if lane is not None:
            lane.admitted_s = at
            self.enter(lane, DRIVER, at)

    def _run_ended(self, event: ev.RunEnded) -> None:
        for name in [name for name in self.lanes if plain_name(name)[0] == event.run_id]:
            self._ended(ev.TrajectoryEnded(event.at, name, "aborted"))
        self.runs.pop(event.run_id, None)

    def _program_ended(self, event: ev.ProgramEnded) -> None:
        lane = self.lanes.get(event.trajectory_id)
        if lane is None:
            return
        self._uncount(lane)
        lane.move_home(None)
        lane.step = None
        self.actions.rest(lane, event.at)

    def _ended(self, event: ev.TrajectoryEnded) -> None:
        lane = self.lanes.pop(event.trajectory_id, None)
        if lane is None:
            return
        at = max(event.at, lane.since_s)
        self._uncount(lane)
        lane.move_home(None)
        lane.step = None
        spent = at - lane.since_s
        lane.seconds[lane.phase] += spent
        self.phase_seconds[lane.phase] += spent
        self.by_phase[lane.phase] -= 1
        lane.ended_s, lane.status = at, event.status
        self.ended[event.status] += 1
        self.ended_count += 1
        run = self.run_of(event.trajectory_id)
        run.ended[event.status] += 1
        if not lane.parent:  # a branch has no reward of its own
            for tally in (self.rewards, run.rewards):
                tally.add(lane.group_id, lane.reward)
        self.actions.lane_ended(lane)
        self.ended_lanes.append(lane)
        if event.status != "completed":
            cause = f"{event.status} by {lane.cause}" if lane.cause else event.status
            self.failures.count("trajectory", cause, at, lane.message)
        elif lane.first_tokens == lane.first_tokens and not lane.resumed:
            after = lane.after_step_tokens
            pair = (lane.first_tokens, lane.first_q90_tokens, after if after == after else None)
            self.lengths.offer(LengthPair(*pair, lane.generated_tokens))

    # -- steps -------------------------------------------------------------------------------------

    def _step_requested(self, event: ev.StepRequested) -> None:
        step = event.step
        lane = self.lanes.get(step.step_id.trajectory_id)
        if lane is None:
            return
        lane.step = step.step_id
        lane.requested_s = event.at
        lane.set_context(step.context_tokens)
        self.enter(lane, MIGRATION if lane.trajectory_id in self.engines.moving else LLM_QUEUE, event.at)

    def _step_placed(self, command: cmd.StartStep, at: float) -> None:
        lane = self.lanes.get(command.step_id.trajectory_id)
        engine = self.engines.rows.get(command.engine_id)
        if lane is None or engine is None:
            return
        lane.engine = engine
        engine.queued += 1
        lane.move_home(engine)
        self.enter(lane, LLM_QUEUE, at)

    def _step_started(self, event: ev.StepStarted) -> None:
        lane = self._lane_at(event)
        if lane is None or lane.generating or lane.engine is None:
            return
        lane.generating = True
        lane.engine.generating += 1
        lane.engine.queued -= 1
        self.enter(lane, GENERATING, event.at)

    def _lane_at(self, event: ev.StepStarted | ev.StepFinished | ev.StepFailed) -> Lane | None:
        """The lane whose current step this is, at its current engine; None when the event is stale."""
        lane = self.lanes.get(event.step_id.trajectory_id)
        if lane is None or lane.step != event.step_id:
            return None
        engine = lane.engine
        return lane if engine is not None and engine.engine_id == event.engine_id else None

    def _uncount(self, lane: Lane) -> None:
        """Take the lane's step off its engine; a lost engine is no home after that."""
        engine = lane.engine
        if engine is None:
            return
        if lane.generating:
            engine.generating -= 1
            lane.generating = False
        else:
            engine.queued -= 1
        lane.engine = None
        if engine.expiring:
            lane.has_kv = False
        if engine.state == "lost" or engine.expiring:
            lane.move_home(None)

    def _end_step(self, lane: Lane, at: float) -> None:
        self._uncount(lane)
        lane.step = None
        self.actions.rest(lane, at)

    def _step_finished(self, event: ev.StepFinished) -> None:
        lane = self._lane_at(event)
        if lane is None:
            return
        engine = lane.engine
        if engine is not None and engine.engine_id == event.engine_id and engine.state != "lost":
            lane.has_kv = True
        self._end_step(lane, event.at)
        new_tokens = event.new_tokens
        self.prompt_tokens += lane.context_tokens
        self.cached_tokens += event.cached_tokens
        self.generated_tokens += new_tokens
        lane.set_context(lane.context_tokens + new_tokens)
        lane.generated_tokens += new_tokens
        lane.open_step_tokens += new_tokens
        row = self.engines.rows.get(event.engine_id)
        if row is not None:
            row.generated_tokens += new_tokens
        if event.finish_reason != "abort":
            lane.steps += 1
            lane.open_step_tokens = 0
            self.steps += 1
            if row is not None:
                row.steps += 1

    def _step_failed(self, event: ev.StepFailed) -> None:
        lane = self._lane_at(event)
        if lane is not None:
            self.failures.count("step", event.cause, event.at)
            self._end_step(lane, event.at)

    def _step_cancelled(self, event: ev.StepCancelled) -> None:
        lane = self.lanes.get(event.step_id.trajectory_id)
        if lane is not None and lane.step == event.step_id:
            self._end_step(lane, event.at)

    def _step_aborted(self, command: cmd.AbortStep, at: float) -> None:
        if command.reason.startswith(PREEMPTED_FOR):
            self.preemptions += 1
            lane = self.lanes.get(command.step_id.trajectory_id)
            if lane is not None:
                lane.preemptions += 1
        elif command.reason.startswith(REQUEUED):
            self._requeues += 1

    @property
    def requeues(self) -> int:
        """Steps that went back to the queue for no decision of the strategy."""
        return self._requeues + self.engines.stranded_steps

    def _step_given_up(self, command: cmd.GiveUpStep, at: float) -> None:
        self.failures.count("step", command.cause, at)
        lane = self.lanes.get(command.step_id.trajectory_id)
        if lane is not None and lane.step == command.step_id:
            self._end_step(lane, at)

    def _predicted(self, event: ev.PredictionMade) -> None:
        lane = self.lanes.get(event.trajectory_id)
        if lane is None or event.steps_finished != lane.steps:
            return
        self.engines.leave(lane)
        prediction = event.prediction
        lane.predicted_at_tokens = lane.generated_tokens - lane.open_step_tokens
        lane.remaining_tokens = prediction.tokens
        if lane.steps == 0:
            lane.first_tokens, lane.first_q90_tokens = prediction.tokens, prediction.tokens_q90
        elif lane.after_step_tokens != lane.after_step_tokens:
            lane.after_step_tokens = lane.predicted_at_tokens + prediction.tokens

    # -- series ------------------------------------------------------------------------------------

    def _sample(self, at: float) -> None:
        series, engines = self.series, self.engines
        series.begin_sample(at)
        columns = series.columns
        slots, resident, capacity = engines.sums()
        counts = (self.live, self.ended_count, self.steps, self.generated_tokens)
        values = (*counts, slots, resident, capacity, engines.moves_started, self.preemptions)
        for total, value in zip(TOTALS, values, strict=True):
            columns[total].append(value)
        for phase, count in enumerate(self.by_phase):
            columns[phase].append(count)
        engines.sample(columns)
