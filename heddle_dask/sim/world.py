"""The simulated body of the controller: it replaces Dask, HTTP and clocks by virtual time.

It sends events to the controller and carries out its commands. Strategies and controller are those of a live run.
Seeded and single-threaded: equal inputs give equal results, to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import FIRST_RUN, EngineId, PolicyVersion, StepId, TrajectoryId
from heddle_dask.core.nouns import EngineDescription, StepRequest, TpDegreePlan
from heddle_dask.core.run_description import RetryPolicy, RunDescription
from heddle_dask.core.run_record import plain_name
from heddle_dask.core.view import StrategySet
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.predictors.contract import Predictor
from heddle_dask.sim.calls import SimulatedCalls
from heddle_dask.sim.deployment import SimulatedDeployment
from heddle_dask.sim.engine import SharedCores, SimulatedEngine
from heddle_dask.sim.fleet import FaultDraws, SimulatedFleet
from heddle_dask.sim.kv_cache import SimulatedJob
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.moves import SimulatedMoves
from heddle_dask.sim.program import Program, SimulatedCall
from heddle_dask.sim.runs import (
    SimulatedPredictions,
    SimulatedRun,
    SimulatedRuns,
    numbered,
    programs_of,
    strategies_builder,
)
from heddle_dask.workloads.planned import PlannedTrajectory


class SimulatedWorld:
    """One rollout of planned trajectories, or several that share the cluster.

    Parameters
    ----------
    predictor
        Required if the strategies have a predictor.
    deployment
        Plans the engines of the rollout. The engines of the fleet then do not join; its other fields apply.
    watch
        Called with every event and its commands, in order, like a journal.
    weight, others
        Weight of this run, and the runs that share the cluster with it. Their trajectories are known by qualified names
        (`core.run_record`).

    Attributes
    ----------
    programs
        Programs by trajectory id, in order of submission, with their times and counts.
    """

    def __init__(
        self,
        strategies: StrategySet,
        fleet: SimulatedFleet,
        trajectories: Sequence[PlannedTrajectory],
        *,
        predictor: Predictor | None = None,
        seed: int = 0,
        retries: RetryPolicy | None = None,
        deployment: SimulatedDeployment | None = None,
        watch: Callable[[ev.Event, Sequence[cmd.Command]], None] | None = None,
        weight: float = 1.0,
        others: Sequence[SimulatedRun] = (),
    ) -> None:
        self.fleet = fleet
        self.controller = Controller(strategies, retries, strategies_builder(fleet.beliefs))
        self.time = VirtualTime()
        joining = numbered(others)
        own = {plan.trajectory_id: Program(plan) for plan in trajectories}
        self.programs = {**own, **programs_of(joining)}
        first = RunDescription(weight=weight, retries=self.controller.retries)
        self._runs = SimulatedRuns(first, joining, self.programs.values(), self.time, self._tell)
        self.engines: dict[EngineId, SimulatedEngine] = {}
        self._versions: dict[EngineId, PolicyVersion] = {}
        self.events = 0
        self._shared = SharedCores(fleet.crowded, self.time)
        predictors = {FIRST_RUN: predictor, **{run_id: run.predictor for run_id, run in joining.items()}}
        self._predictions = {
            run_id: SimulatedPredictions(each, self.time, fleet.delays, self.controller.state, self._tell)
            for run_id, each in predictors.items()
        }
        self._fault_draws = FaultDraws(fleet.faults, seed)
        # Steps that were sent to an engine and have not reported, with their engine.
        self._jobs: dict[StepId, tuple[EngineId, SimulatedJob]] = {}
        self.moves = SimulatedMoves(fleet, self.time, self.engines, self._versions, self._keeps_kv, self._tell)
        self.calls = SimulatedCalls(
            fleet, self.time, self._fault_draws.tool_fails, self._tell, self._returned, self._tool_given_up
        )
        self._deployment = deployment
        self._watch = watch

    def run(self) -> None:
        """Run until every trajectory has ended, or the walltime is over."""
        if self._deployment is None:
            for number, (description, cost) in enumerate(self.fleet.engines):
                joins_s = self.fleet.faults.engines_join.get(number, 0.0)
                if joins_s > 0:
                    self.time.at(joins_s, self._join, description, cost)
                else:
                    self._join(description, cost)
        else:
            self._degree_request = self._deployment.request(one.spec for one in self.programs.values())
            self._tell(ev.DegreesRequested(0.0, self._degree_request))
        self.calls.start()
        for number, lost_s in sorted(self.fleet.faults.engines_lost.items()):
            self.time.at(lost_s, self._lose_engine, self.fleet.engines[number][0].engine_id)
        for number, ends_s in self.fleet.faults.engines_end.items():
            self._end_engine(self.fleet.engines[number][0].engine_id, ends_s)
        self._runs.start()
        for program in self._runs.of_first:
            if program.plan.submitted_s > 0:
                self.time.at(program.plan.submitted_s, self._submit, program)
            else:
                self._submit(program)
        walltime_s = self.fleet.faults.walltime_s
        if walltime_s:
            self.time.run(walltime_s)
            self._abort_all(walltime_s)
        else:
            self.time.run()
        stuck = [name for name, program in self.programs.items() if not program.status]
        if stuck:
            raise RuntimeError(f"{len(stuck)} trajectories never ended, the first is {stuck[0]}: a bug")

    def _submit(self, program: Program) -> None:
        self._tell(ev.TrajectorySubmitted(self.time.now_s, program.spec))

    def _wake(self) -> None:
        self._tell(ev.TimeReached(self.time.now_s))

    def _join(self, description: EngineDescription, cost: EngineCost) -> None:
        engine = SimulatedEngine(
            description, cost, self.time, self._admitted, self._ended, self.fleet.delays, self._shared.changed
        )
        self._shared.engines.append(engine)
        self.engines[description.engine_id] = engine
        self._versions[description.engine_id] = PolicyVersion(description.lineage, description.policy_version)
        self._tell(ev.EngineJoined(self.time.now_s, description))
        life_s = self._fault_draws.life_s(description.engine_id)
        if life_s:
            self.time.after(life_s, self._replace_engine, description, cost)

    def _plan_degrees(self, command: cmd.PlanDegrees) -> None:
        assert self._deployment is not None
        plan = self._deployment.plan(self._degree_request)
        self.time.after(0.0, self._degrees_planned, command.request_id, plan)

    def _degrees_planned(self, request_id: int, plan: TpDegreePlan) -> None:
        self._tell(ev.DegreesPlanned(self.time.now_s, request_id, plan))

    def _deploy(self, command: cmd.DeployEngines) -> None:
        assert self._deployment is not None
        for description, cost in self._deployment.engines(command.tp_degrees):
            self.time.after(0.0, self._join, description, cost)

    def _abort_all(self, at: float) -> None:
        """Abort all trajectories at the end of the allocation.

        Waiting trajectories are aborted first; otherwise the end of a running one would admit them.
        """
        alive = [program for program in self.programs.values() if not program.status]
        if alive:
            self.time.now_s = at
        for program in sorted(alive, key=lambda program: not math.isnan(program.started_s)):
            self._end(program, "aborted")
        for engine in self.engines.values():
            engine.close()

    def _tell(self, event: ev.Event) -> None:
        self.events += 1
        commands = self.controller.handle(event)
        if self._watch is not None:
            self._watch(event, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: cmd.Command) -> None:
        match command:
            case cmd.StartStep():
                self._start_step(command)
            case cmd.PredictRemaining():
                self._predictions[plain_name(command.trajectory_id)[0]].ask(command.trajectory_id)
            case cmd.RunAction():
                self.calls.run(command)
            case cmd.AdmitTrajectory():
                self._admit(command)
            case cmd.MoveContext():
                self.moves.begin(command, self.programs[command.trajectory_id])
            case cmd.ReleaseHost():
                self.calls.release(command)
            case cmd.DropContext() | cmd.ReleaseEngine() | cmd.ReportApi() | cmd.CloseSandbox():
                # As live, the engine gets no message. Its worker drops its copy of the tokens, which is not simulated.
                pass
            case cmd.AbortStep():
                self._abort_step(command)
            case cmd.AbortAction():
                self.calls.abort(command)
            case cmd.GiveUpStep():
                self._give_up(command)
            case cmd.GiveUpAction():
                self.calls.give_up(command)
            case cmd.WakeUp():
                self.time.at(max(command.at_s, self.time.now_s), self._wake)
            case cmd.LoadService() | cmd.EvictService() | cmd.DropServiceCopy():
                self.calls.carry_out(command)
            case cmd.PlanDegrees():
                self._plan_degrees(command)
            case cmd.DeployEngines():
                self._deploy(command)
            case cmd.FetchWeights():
                self.time.after(0.0, self._fetched, command)
            case cmd.InstallWeights():
                self.time.after(0.0, self._installed, command)
            case cmd.CancelTrajectory():
                self.time.after(0.0, self._cancelled, command)
            case _:
                assert_never(command)

    # -- weights -----------------------------------------------------------------------------------------------

    def _fetched(self, command: cmd.FetchWeights) -> None:
        self._tell(ev.WeightsFetched(self.time.now_s, command.engine_id, command.version))

    def _keeps_kv(self) -> bool:
        return self.controller.state.weights.policy.keep_kv

    def _version_of(self, engine_id: EngineId, job: SimulatedJob) -> int:
        """Number of the version that sampled the first token of a job."""
        return self._versions[engine_id].number

    def _installed(self, command: cmd.InstallWeights) -> None:
        self._versions[command.engine_id] = command.version
        self._tell(ev.WeightsInstalled(self.time.now_s, command.engine_id, command.version))

    def _cancelled(self, command: cmd.CancelTrajectory) -> None:
        program = self.programs[command.trajectory_id]
        if not program.status:
            self._end(program, "cancelled")

    # -- programs ----------------------------------------------------------------------------------------------

    def _admit(self, command: cmd.AdmitTrajectory) -> None:
        program = self.programs[command.trajectory_id]
        program.started_s = self.time.now_s
        self._ask(program)

    def _ask(self, program: Program) -> None:
        """Request the next step, or the rest of a preempted one."""
        program.asked_s = self.time.now_s
        self.time.after(self.fleet.delays.request_s, self._request, program)

    def _request(self, program: Program) -> None:
        if program.status:
            return
        step = StepRequest(
            program.step_id,
            context_tokens=program.context_tokens,
            max_new_tokens=program.left_tokens,
        )
        self._tell(ev.StepRequested(self.time.now_s, step))

    def _go_on(self, program: Program) -> None:
        """Continue after a complete step: call its tool, request the next step, or end."""
        step = program.plan.steps[program.step_index]
        program.finish_step()
        if program.step_index == len(program.plan.steps):
            self._reward(program)
        elif step.tool is None:
            program.observe(step.observation_tokens)
            self._ask(program)
        else:
            work = step.action or self.calls.plain(step.tool, step.tool_s)
            self.calls.call(program, str(program.step_index), work)

    def _reward(self, program: Program) -> None:
        """Call the next reward of a program, or end it."""
        done, rewards = program.rewards_done, program.plan.rewards
        if done == len(rewards):
            self._end(program, "completed")
        else:
            self.calls.call(program, f"reward {done}", rewards[done])

    def _end(self, program: Program, status: str) -> None:
        program.status = status
        program.finished_s = self.time.now_s
        trajectory_id = TrajectoryId(program.plan.trajectory_id)
        self._predictions[program.run_id].ended(trajectory_id, status)
        self._tell(ev.TrajectoryEnded(self.time.now_s, trajectory_id, status))
        self.calls.trajectory_ended(trajectory_id)
        self._runs.program_ended(program)

    def _give_up(self, command: cmd.GiveUpStep) -> None:
        self.time.after(0.0, self._end, self.programs[command.step_id.trajectory_id], "failed")

    # -- steps -------------------------------------------------------------------------------------------------

    def _start_step(self, command: cmd.StartStep) -> None:
        step_id = command.step_id
        program = self.programs[step_id.trajectory_id]
        job = SimulatedJob(
            prompt_tokens=program.context_tokens,
            length=1 if command.prefill_only else program.left_tokens,
            priority=-command.priority.number,
            trajectory_id=step_id.trajectory_id,
            group_id=program.plan.group_id,
            shared_tokens=program.plan.prompt_tokens,
            step_id=step_id,
            bypass_queue=command.bypass_queue,
        )
        program.note_engine(command.engine_id)
        self._jobs[step_id] = command.engine_id, job
        self.time.after(self.fleet.delays.start_s, self.engines[command.engine_id].submit, job)

    def _abort_step(self, command: cmd.AbortStep) -> None:
        sent = self._jobs.get(command.step_id)
        if sent is not None:
            self.time.after(self.fleet.delays.start_s, self.engines[command.engine_id].abort, sent[1])

    def _admitted(self, engine: SimulatedEngine, job: SimulatedJob) -> None:
        if not job.is_step:
            return
        program = self.programs[job.trajectory_id]
        program.queue_s += self.time.now_s - program.asked_s
        program.prefilled_tokens += job.prompt_tokens - job.cached_tokens
        self.time.after(self.fleet.delays.report_s, self._started, engine.description.engine_id, job)

    def _started(self, engine_id: EngineId, job: SimulatedJob) -> None:
        assert job.step_id is not None
        self._tell(ev.StepStarted(self.time.now_s, job.step_id, engine_id))

    def _ended(self, engine: SimulatedEngine, job: SimulatedJob) -> None:
        if not job.is_step:
            self.moves.step_ended(job)
        else:
            self.time.after(self.fleet.delays.report_s, self._report, engine.description.engine_id, job)

    def _report(self, engine_id: EngineId, job: SimulatedJob) -> None:
        program = self.programs[job.trajectory_id]
        step_id = job.step_id
        assert step_id is not None
        # If the engine was lost while its report was in transit, another engine runs the step by now.
        sent = self._jobs.get(step_id)
        superseded = sent is None or sent[1] is not job
        if not superseded:
            del self._jobs[step_id]
        self._tell(
            ev.StepFinished(
                at=self.time.now_s,
                step_id=step_id,
                engine_id=engine_id,
                new_tokens=job.generated,
                cached_tokens=job.cached_tokens,
                finish_reason="abort" if job.aborted or job.generated < program.left_tokens else "length",
                policy_version=self._version_of(engine_id, job),
            )
        )
        if superseded or program.status:
            return
        program.generate(job.generated)
        if job.aborted:
            program.preempted()
            self._ask(program)
        elif program.left_tokens > 0:
            program.prefilled()
            self._ask(program)
        else:
            self._go_on(program)

    # -- calls -------------------------------------------------------------------------------------------------

    def _returned(self, program: Program, call: SimulatedCall) -> None:
        """A call came back to its program, which goes on."""
        if call.work.kind == "reward":
            program.rewards_done += 1
            self._reward(program)
            return
        program.observe(program.plan.steps[program.step_index - 1].observation_tokens)
        self._ask(program)

    def _tool_given_up(self, program: Program) -> None:
        self.time.after(0.0, self._end, program, "failed")

    # -- faults ------------------------------------------------------------------------------------------------

    def _replace_engine(self, description: EngineDescription, cost: EngineCost) -> None:
        """Lose an engine with its worker and start a replacement later; does nothing after the last trajectory."""
        engine = self.engines[description.engine_id]
        if engine.lost or all(program.status for program in self.programs.values()):
            return
        self._lose_engine(description.engine_id)
        self.time.after(self.fleet.faults.engine_restart_s, self._start_another, description, cost)

    def _start_another(self, description: EngineDescription, cost: EngineCost) -> None:
        self._join(replace(description, engine_id=EngineId(f"engine-{len(self.engines)}")), cost)

    def _end_engine(self, engine_id: EngineId, ends_s: float) -> None:
        begins_s, expires_s = self.fleet.faults.drain_times(ends_s)
        for event in (
            ev.EngineDraining(begins_s, engine_id, ends_s),
            ev.EngineExpiring(expires_s, engine_id),
        ):
            self.time.at(event.at, self._tell, event)
        self.time.at(ends_s, self._lose_engine, engine_id)

    def _lose_engine(self, engine_id: EngineId) -> None:
        if self.engines[engine_id].lost:  # by another fault
            return
        self.engines[engine_id].lose()
        for step_id, (where, _) in list(self._jobs.items()):
            if where == engine_id:
                del self._jobs[step_id]
                self.programs[step_id.trajectory_id].asked_s = self.time.now_s
        self._tell(ev.EngineLost(self.time.now_s, engine_id, "simulated fault", stranded=True))
