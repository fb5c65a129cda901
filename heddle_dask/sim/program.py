"""The agent of a simulation: follows its plan, and remembers what it met on its way."""

from __future__ import annotations

import math

from heddle_dask.core.ids import EngineId, GroupId, StepId, TrajectoryId
from heddle_dask.core.nouns import TrajectorySpec
from heddle_dask.workloads.planned import PlannedTrajectory


class Program:
    """One planned trajectory under way.

    Attributes
    ----------
    step_index, attempt
        The step that it wants next or waits for; attempts count the parts of a step that was stopped.
    context_tokens
        Tokens in front of the model.
    left_tokens
        What is still to be generated in this step; at least 1.
    queue_s
        Seconds between asking for steps and their admission to a batch.
    prefilled_tokens
        Prompt tokens that engines computed for it.
    engines
        How often it changed its engine, and the latest.
    """

    __slots__ = (
        "asked_s",
        "attempt",
        "context_tokens",
        "engine_changes",
        "engine_id",
        "finished_s",
        "left_tokens",
        "plan",
        "preemptions",
        "prefilled_tokens",
        "queue_s",
        "started_s",
        "status",
        "step_index",
    )

    def __init__(self, plan: PlannedTrajectory) -> None:
        self.plan = plan
        self.step_index = 0
        self.attempt = 0
        self.context_tokens = plan.prompt_tokens
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

    @property
    def spec(self) -> TrajectorySpec:
        """As it is announced to the controller."""
        plan = self.plan
        return TrajectorySpec(
            trajectory_id=TrajectoryId(plan.trajectory_id),
            group_id=GroupId(plan.group_id),
            sample_index=plan.sample_index,
            domain=plan.domain,
            prompt_tokens=plan.prompt_tokens,
            message_tokens=plan.message_tokens,
            max_steps=plan.max_steps,
        )

    @property
    def step_id(self) -> StepId:
        """The step it is at, as it is asked for next."""
        return StepId(TrajectoryId(self.plan.trajectory_id), self.step_index, self.attempt)

    def note_engine(self, engine_id: EngineId) -> None:
        """A step goes there."""
        self.engine_changes += self.engine_id not in (None, engine_id)
        self.engine_id = engine_id

    def generate(self, tokens: int) -> None:
        """So many tokens were sampled."""
        self.context_tokens += tokens
        self.left_tokens -= tokens

    def preempted(self) -> None:
        """The step was stopped; its rest is asked for anew."""
        self.preemptions += 1
        self.attempt += 1

    def finish_step(self) -> None:
        """The step is whole."""
        self.step_index += 1
        self.attempt = 0
        if self.step_index < len(self.plan.steps):
            self.left_tokens = self.plan.steps[self.step_index].generated_tokens

    def observe(self, tokens: int) -> None:
        """A tool has answered."""
        self.context_tokens += tokens
