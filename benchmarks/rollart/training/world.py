"""The world of a simulated training run: trajectories come one after the other, and weights change under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from benchmarks.rollart.training.times import TrainingTimes
from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId, GroupId, PolicyVersion, StepId, TrajectoryId
from heddle_dask.core.run_description import RunDescription
from heddle_dask.core.view import StrategySet
from heddle_dask.predictors.contract import Predictor
from heddle_dask.sim.engine import SimulatedEngine
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.kv_cache import SimulatedJob
from heddle_dask.sim.program import Program
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.workloads.planned import PlannedTrajectory

CANCELLED = "cancelled"
"""Status of a program that was cancelled."""


class TrainingWorld(SimulatedWorld):
    """A simulated cluster that takes trajectories at any time, and goes over to newer weights when told.

    Parameters
    ----------
    run
        The run with its bound and its way of updating weights.
    times
        Seconds of fetching and installing.
    training
        What is told of ends, cancellations and installations.
    reset_s
        Seconds to reset a trajectory's environment, after its admission [default: none].
    lockstep
        So many trajectories at a time, in the order of their submission, generate one step together, then their
        environments take one together, and so on: batch-level interaction. 0: each goes on by itself.

    Attributes
    ----------
    first_versions
        Version that sampled the first token, by trajectory that has one.
    """

    def __init__(
        self,
        strategies: StrategySet,
        fleet: SimulatedFleet,
        run: RunDescription,
        times: TrainingTimes,
        training: TrainingBody,
        *,
        predictor: Predictor | None = None,
        seed: int = 0,
        reset_s: Callable[[PlannedTrajectory], float] | None = None,
        lockstep: int = 0,
    ) -> None:
        super().__init__(strategies, fleet, (), predictor=predictor, seed=seed)
        self.first_versions: dict[str, int] = {}
        self._run = run
        self._times = times
        self._job_versions: dict[StepId, int] = {}
        self._training = training
        self._reset_s = reset_s or (lambda _: 0.0)
        self._lockstep = lockstep
        self._barriers: list[_Barrier] = []
        self._barrier_of: dict[str, _Barrier] = {}

    def start(self) -> None:
        """Describe the run, and let the engines and hosts join."""
        self._tell(ev.RunStarted(self.time.now_s, self._run))
        if self._run.staleness is not None:
            self.tell_step(0)
        for description, cost in self.fleet.engines:
            self._join(description, cost)
        self.calls.start()

    def submit(self, plan: PlannedTrajectory) -> None:
        """Submit a trajectory now, after all that is done now: a barrier must know all that are submitted."""
        program = self.programs[plan.trajectory_id] = Program(plan)
        if self._lockstep:
            if len(self._barrier_of) % self._lockstep == 0:
                self._barriers.append(_Barrier())
            self._barrier_of[plan.trajectory_id] = self._barriers[-1]
            self._barriers[-1].alive += 1
        self.time.after(0.0, self._submit, program)

    # -- what the training tells the controller ------------------------------------------------------------------

    def tell_step(self, number: int) -> None:
        """The trainer has finished `number` optimiser steps."""
        self._tell(ev.OptimizerStepEnded(self.time.now_s, self._run.run_id, PolicyVersion("", number)))

    def tell_published(self, number: int) -> None:
        """The weights of a step are in the store."""
        self._tell(ev.WeightsPublished(self.time.now_s, PolicyVersion("", number), f"version {number}"))

    def tell_switch(self, number: int) -> None:
        """Engines are to go over to these weights."""
        self._tell(ev.SwitchRequested(self.time.now_s, PolicyVersion("", number)))

    def tell_group(self, group_id: str, accepted: int) -> None:
        """A group is in the buffer, or was dropped."""
        if self._run.staleness is not None:
            self._tell(ev.GroupEnded(self.time.now_s, self._run.run_id, GroupId(group_id), accepted))

    def tell_redundant(self, trajectory_id: str) -> None:
        """There is enough without this trajectory."""
        self._tell(ev.TrajectoryRedundant(self.time.now_s, TrajectoryId(trajectory_id)))

    @property
    def oldest_version(self) -> int:
        """The oldest version on an engine."""
        return min(version.number for version in self._versions.values())

    def generated_tokens(self, program: Program) -> int:
        """Tokens that a trajectory has sampled so far."""
        steps, index = program.plan.steps, program.step_index
        done = sum(step.generated_tokens for step in steps[:index])
        if index == len(steps):
            return done
        sent = self._jobs.get(program.step_id)
        running = self.engines[sent[0]].sampled_tokens(sent[1]) if sent is not None else 0
        return done + steps[index].generated_tokens - program.left_tokens + running

    # -- hooks of the world ------------------------------------------------------------------------------------

    def _submit(self, program: Program) -> None:
        if not program.status:
            super()._submit(program)

    def _admit(self, command: cmd.AdmitTrajectory) -> None:
        program = self.programs[command.trajectory_id]
        program.started_s = self.time.now_s
        self._training.admitted(program)
        self.time.after(self._reset_s(program.plan), self._ask, program)

    def _admitted(self, engine: SimulatedEngine, job: SimulatedJob) -> None:
        if job.step_id is not None:
            version = self._versions[engine.description.engine_id].number
            self.first_versions.setdefault(job.trajectory_id, version)
            self._job_versions[job.step_id] = version
        super()._admitted(engine, job)

    def _version_of(self, engine_id: EngineId, job: SimulatedJob) -> int:
        assert job.step_id is not None
        return self._job_versions.pop(job.step_id, self._versions[engine_id].number)

    def _ask(self, program: Program) -> None:
        if not program.status:
            self._together(super()._ask, program)

    def _go_on(self, program: Program) -> None:
        self._together(super()._go_on, program)

    def _end(self, program: Program, status: str) -> None:
        super()._end(program, status)
        barrier = self._barrier_of.get(program.plan.trajectory_id)
        if barrier is not None:
            barrier.alive -= 1
            barrier.release()
        if status != CANCELLED:
            self._training.ended(program)

    def _together(self, go_on: Callable[[Program], None], program: Program) -> None:
        barrier = self._barrier_of.get(program.plan.trajectory_id)
        if barrier is None or program.attempt:  # the rest of a preempted step
            go_on(program)
        else:
            barrier.arrive(go_on, program)

    # -- weights and cancellations -------------------------------------------------------------------------------

    def _carry_out(self, command: cmd.Command) -> None:
        if isinstance(command, cmd.FetchWeights):
            self.time.after(self._times.fetch_s, self._fetched, command)
        elif isinstance(command, cmd.CancelTrajectory):
            self.time.after(0.0, self._cancel, command)
        else:
            super()._carry_out(command)

    def _installed(self, command: cmd.InstallWeights) -> None:
        # What is admitted from now on is sampled after the pause.
        self._versions[command.engine_id] = command.version
        pause_s = self._times.install_s
        self.engines[command.engine_id].install(pause_s, keep_kv=command.keep_kv)
        self.time.after(pause_s, self._resumed, command, pause_s)

    def _resumed(self, command: cmd.InstallWeights, pause_s: float) -> None:
        self._tell(ev.WeightsInstalled(self.time.now_s, command.engine_id, command.version, pause_s))
        self._training.installed(pause_s)

    def _cancel(self, command: cmd.CancelTrajectory) -> None:
        program = self.programs[command.trajectory_id]
        if not program.status:
            lost = self.generated_tokens(program)
            self._end(program, CANCELLED)
            self._training.cancelled(program, command.cause, lost)


class TrainingBody(Protocol):
    """What the world tells of trajectories and weights."""

    def admitted(self, program: Program) -> None:
        """A trajectory starts."""

    def ended(self, program: Program) -> None:
        """A trajectory has ended by itself."""

    def cancelled(self, program: Program, cause: str, lost_tokens: int) -> None:
        """A trajectory was cancelled, with the tokens that it had."""

    def installed(self, paused_s: float) -> None:
        """An engine has newer weights."""


class _Barrier:
    """Holds programs until all that are alive have come."""

    def __init__(self) -> None:
        self.alive = 0
        self._held: list[tuple[Callable[[Program], None], Program]] = []

    def arrive(self, go_on: Callable[[Program], None], program: Program) -> None:
        """A program waits for the others, and then goes on."""
        self._held.append((go_on, program))
        self.release()

    def release(self) -> None:
        """Let all go on if nobody is missing."""
        self._held = [held for held in self._held if not held[1].status]
        if len(self._held) < self.alive:
            return
        held, self._held = self._held, []
        for go_on, program in held:
            go_on(program)
