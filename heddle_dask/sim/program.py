"""The agent program of a simulated trajectory, which follows its plan; what carries out its actions in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from heddle_dask.core.commands import RunAction
from heddle_dask.core.events import ActionFinished
from heddle_dask.core.ids import FIRST_RUN, ActionId, EngineId, GroupId, RunId, StepId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, TrajectorySpec
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.workloads.planned import PlannedAction, PlannedTrajectory


class Program:
    """One planned trajectory in progress.

    Attributes
    ----------
    step_index, attempt
        The step to be requested next or waited for; attempts count the parts of a preempted step.
    context_tokens, delivered_tokens
        Tokens of the context now, and up to the latest sampled token: what an engine has had.
    left_tokens
        Tokens still to be generated in this step; at least 1.
    queue_s
        Seconds between step requests and admissions to a batch, over all steps.
    prefilled_tokens
        Prompt tokens that engines computed for the trajectory.
    engines
        Number of engine changes, and the latest engine.
    rewards_done
        Rewards that have ended.
    """

    __slots__ = (
        "asked_s",
        "attempt",
        "context_tokens",
        "delivered_tokens",
        "engine_changes",
        "engine_id",
        "finished_s",
        "left_tokens",
        "plan",
        "preemptions",
        "prefilled_tokens",
        "queue_s",
        "rewards_done",
        "run_id",
        "started_s",
        "status",
        "step_index",
    )

    def __init__(self, plan: PlannedTrajectory, run_id: RunId = FIRST_RUN) -> None:
        self.plan = plan
        self.run_id = run_id
        self.step_index = 0
        self.attempt = 0
        self.context_tokens = plan.prompt_tokens
        self.delivered_tokens = 0
        self.left_tokens = plan.steps[0].generated_tokens
        self.status = ""
        self.started_s = math.nan
        self.finished_s = math.nan
        self.asked_s = 0.0
        self.queue_s = 0.0
        self.prefilled_tokens = 0
        self.preemptions = 0
        self.engine_id: EngineId | None = None
        self.engine_changes = 0
        self.rewards_done = 0

    @property
    def spec(self) -> TrajectorySpec:
        """The specification that is submitted to the controller."""
        plan = self.plan
        return TrajectorySpec(
            trajectory_id=TrajectoryId(plan.trajectory_id),
            group_id=GroupId(plan.group_id),
            sample_index=plan.sample_index,
            domain=plan.domain,
            prompt_tokens=plan.prompt_tokens,
            message_tokens=plan.message_tokens,
            max_steps=plan.max_steps,
            run_id=self.run_id,
            prompt_key=plan.prompt_key,
        )

    @property
    def step_id(self) -> StepId:
        return StepId(TrajectoryId(self.plan.trajectory_id), self.step_index, self.attempt)

    def note_engine(self, engine_id: EngineId) -> None:
        self.engine_changes += self.engine_id not in (None, engine_id)
        self.engine_id = engine_id

    def generate(self, tokens: int) -> None:
        self.context_tokens += tokens
        self.left_tokens -= tokens
        self.delivered_tokens = self.context_tokens

    def preempted(self) -> None:
        """The step was preempted; its remaining tokens are requested as another attempt."""
        self.preemptions += 1
        self.attempt += 1

    def prefilled(self) -> None:
        """Only the prompt and a token were computed; the remaining tokens are requested as another attempt."""
        self.attempt += 1

    def finish_step(self) -> None:
        self.step_index += 1
        self.attempt = 0
        if self.step_index < len(self.plan.steps):
            self.left_tokens = self.plan.steps[self.step_index].generated_tokens

    def observe(self, tokens: int) -> None:
        """Add the tokens of a tool's result to the context."""
        self.context_tokens += tokens


@dataclass(slots=True, eq=False)
class SimulatedCall:
    """One tool or reward call of a simulated program, from its request to its result.

    Attributes
    ----------
    asked_s, begun_s, back_s
        When its program asked, when it began on its host (for the last time, if hosts were lost), and when its program
        went on; negative: not yet.
    units
        Granted units of its elastic resource; CPUs, if it has none.
    run_s
        Seconds that its host reported.
    cause
        What ended it if it failed; empty: it did not.
    """

    request: ActionRequest
    work: PlannedAction
    asked_s: float
    begun_s: float = -1.0
    back_s: float = -1.0
    units: int = 0
    run_s: float = 0.0
    cause: str = ""

    @property
    def action_id(self) -> ActionId:
        return self.request.action_id

    @property
    def trajectory_id(self) -> TrajectoryId:
        return self.request.trajectory_id


class ActionBody(Protocol):
    """Carries out the actions of one kind of host: CPUs, model services, APIs.

    Reports each end by the function that it was given, as `core.events.ActionFinished`; also of an aborted action, but
    not of one whose host is lost.
    """

    def run(self, command: RunAction, call: SimulatedCall) -> None:
        """Begin an action."""

    def abort(self, action_id: ActionId) -> None:
        """End a running action now; it reports what it ran."""

    def trajectory_ended(self, trajectory_id: TrajectoryId) -> None:
        """Drop what is kept for a trajectory."""


MakeActionBody = Callable[[VirtualTime, Callable[[ActionFinished, SimulatedCall], None]], ActionBody]
"""Makes one from the time and the function for the event of each action that has ended or was aborted."""
