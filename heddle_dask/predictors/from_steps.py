"""Converts earlier trajectories to training data, with the decision points that a live session would have had.

A live session predicts when a trajectory is submitted, at the end of every step, and when its tool is called, before
the tool has run (`from_state`). Warm-start data must have the same decision points: of the latest step's tool the
label is known, but neither its time nor the tokens that it adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from heddle_dask.predictors.features import NAN, RECENT, Finished, Progress
from heddle_dask.predictors.known import KnownWork
from heddle_dask.workloads.planned import PlannedTrajectory


@dataclass(frozen=True, slots=True)
class PastStep:
    """One recorded step and its tool.

    Attributes
    ----------
    observed_tokens
        Tokens appended after it.
    llm_s
        Seconds from the request to the result; nan when not known.
    tools
        Label, seconds and success of every action before the next step.
    """

    generated_tokens: int
    observed_tokens: int = 0
    llm_s: float = NAN
    tools: tuple[tuple[str, float, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class PastTrajectory:
    """A trajectory that has ended; `message_tokens` and `max_steps` are 0, `prompt_key` is empty when not known."""

    trajectory_id: str
    group_id: str
    domain: str
    policy_version: int
    prompt_tokens: int
    censored: bool
    steps: Sequence[PastStep]
    message_tokens: int = 0
    max_steps: int = 0
    prompt_key: str = ""


def past_of(plan: PlannedTrajectory, *, censored: bool = False, policy_version: int = 0) -> PastTrajectory:
    """A planned trajectory as one that has ended; the durations of its steps are not known."""
    steps = [
        PastStep(
            generated_tokens=step.generated_tokens,
            observed_tokens=step.observation_tokens,
            tools=((step.tool, step.tool_s, True),) if step.tool is not None else (),
        )
        for step in plan.steps
    ]
    return PastTrajectory(
        plan.trajectory_id,
        plan.group_id,
        plan.domain,
        policy_version,
        plan.prompt_tokens,
        censored,
        steps,
        message_tokens=plan.message_tokens,
        max_steps=plan.max_steps,
        prompt_key=plan.prompt_key,
    )


def known_work(plans: Iterable[PlannedTrajectory]) -> KnownWork:
    """The true totals of planned trajectories, for oracles."""
    known = KnownWork()
    for plan in plans:
        known.tokens[plan.trajectory_id] = float(sum(step.generated_tokens for step in plan.steps))
        known.tools_s[plan.trajectory_id] = sum(step.tool_s for step in plan.steps if step.tool is not None)
        observed = sum(step.observation_tokens for step in plan.steps[:-1])
        known.observed_tokens[plan.trajectory_id] = float(observed)
    return known


def finished_from_steps(past: PastTrajectory) -> Finished:
    """A trajectory that has ended, with its decision points.

    Notes
    -----
    The data have no clock that siblings share, so its group counts as earlier runs of the same prompts.
    """
    points = [_point(past, 0)]
    points += [_point(past, done) for done in range(1, len(past.steps))]
    return Finished(
        trajectory_id=past.trajectory_id,
        group_id=past.group_id,
        domain=past.domain,
        policy_version=past.policy_version,
        prompt_tokens=past.prompt_tokens,
        message_tokens=past.message_tokens,
        max_steps=past.max_steps,
        generated_tokens=sum(step.generated_tokens for step in past.steps),
        observed_tokens=sum(step.observed_tokens for step in past.steps[:-1]),
        tools_s=_tools_s(past.steps),
        duration_s=_elapsed_s(past.steps) + _tools_s(past.steps[-1:]),
        censored=past.censored,
        started_at_s=NAN,
        ended_at_s=NAN,
        points=tuple(points),
        steps_finished=len(past.steps),
        prompt_key=past.prompt_key,
    )


def _point(past: PastTrajectory, done: int) -> Progress:
    steps = past.steps[:done]
    tools = [tool for step in steps[:-1] for tool in step.tools]
    called = [label for step in steps[-1:] for label, _, _ in step.tools]
    labels = [label for label, _, _ in tools] + called
    times_s = [seconds for _, seconds, _ in tools] + [NAN] * len(called)
    tokens = [step.generated_tokens for step in steps]
    observed = [step.observed_tokens for step in steps[:-1]]
    return Progress(
        trajectory_id=past.trajectory_id,
        group_id=past.group_id,
        domain=past.domain,
        policy_version=past.policy_version,
        prompt_tokens=past.prompt_tokens,
        message_tokens=past.message_tokens,
        max_steps=past.max_steps,
        context_tokens=past.prompt_tokens + sum(tokens) + sum(observed),
        generated_tokens=sum(tokens),
        steps_finished=done,
        step_tokens=tuple(tokens[-RECENT:]),
        observed_tokens=tuple(observed[-RECENT:]),
        tool_labels=tuple(labels[-RECENT:]),
        tool_times_s=tuple(times_s[-RECENT:]),
        tools_s=sum(seconds for _, seconds, _ in tools),
        tool_errors=sum(not ok for _, _, ok in tools),
        last_tool_failed=bool(tools) and not tools[-1][2],
        elapsed_s=_elapsed_s(steps),
        prompt_key=past.prompt_key,
    )


def _tools_s(steps: Sequence[PastStep]) -> float:
    return sum(seconds for step in steps for _, seconds, _ in step.tools)


def _elapsed_s(steps: Sequence[PastStep]) -> float:
    """Seconds until the end of the last of `steps`, without its tools; nan when a step's time is not known."""
    return sum(step.llm_s for step in steps) + _tools_s(steps[:-1])
