"""Planned trajectories: the tokens of every step, and the observation and seconds of every tool call.

A replay, live or simulated, follows such a plan. This module makes plans from recorded trajectories; generators make
synthetic ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import DurationProfile, joined_domain
from heddle_dask.core.resources import ONE_CPU, ResourceDemand
from heddle_dask.workloads.traces import TracedTrajectory


class PromptDoesNotFit(BadInput):
    """The prompt alone fills the engine's context; the message says by how many tokens, and what to do."""


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """One tool or reward call with everything that decides how long it takes.

    Attributes
    ----------
    profile
        Its true seconds by units of its elastic resource.
    demand
        What it may be granted; its program can use all of it.
    kind
        ``"tool"`` or ``"reward"``.
    pool, service
        As in `core.nouns.ActionRequest`.
    in_sandbox, sandbox_bytes
        Whether it needs the sandbox of its trajectory, and the memory that this reserves for its life.
    declared
        The profile that its program declares, which may be wrong; None: none.
    timeout_s
        Seconds after which it is ended; None: never.
    """

    label: str
    profile: DurationProfile
    demand: ResourceDemand = ONE_CPU
    kind: str = "tool"
    pool: str = "cpu"
    service: str = ""
    in_sandbox: bool = False
    sandbox_bytes: int = 0
    declared: DurationProfile | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step to replay: tokens to sample, the tool call after it, and the observation tokens that it adds.

    Attributes
    ----------
    action
        The call in detail, if it is known; `tool_s` is then its shortest time. None: `tool_s` is all there is to it.
    """

    generated_tokens: int
    observation_tokens: int
    tool: str | None
    tool_s: float
    action: PlannedAction | None = None


@dataclass(frozen=True, slots=True)
class PlannedTrajectory:
    """One attempt of an agent at one prompt, with all its steps known.

    Attributes
    ----------
    group_id
        Group of attempts at one prompt, which share the prompt's tokens as a prefix.
    message_tokens, max_steps
        Length of the task itself, and the limit of steps; 0: not known.
    rewards
        Calls after the last step, one after the other; a simulation runs them, a replay does not.
    prompt_key
        Identity of the prompt over passes; empty: the group stands for it.
    """

    trajectory_id: str
    group_id: str
    sample_index: int
    domain: str
    prompt_tokens: int
    steps: tuple[PlannedStep, ...]
    message_tokens: int = 0
    max_steps: int = 0
    rewards: tuple[PlannedAction, ...] = ()
    submitted_s: float = 0.0
    prompt_key: str = ""

    @property
    def generated_tokens(self) -> int:
        return sum(step.generated_tokens for step in self.steps)

    @property
    def context_tokens(self) -> int:
        observed = sum(step.observation_tokens for step in self.steps)
        return self.prompt_tokens + self.generated_tokens + observed

    @property
    def tools_s(self) -> float:
        return sum(step.tool_s for step in self.steps if step.tool is not None)


def is_replayable(trace: TracedTrajectory) -> bool:
    """True if all token counts that a replay needs are known. A replay does not need the last observation."""
    return (
        trace.prompt_tokens is not None
        and all(step.generated_tokens is not None for step in trace.steps)
        and all(step.observation_tokens is not None for step in trace.steps[:-1])
    )


def planned_trace(
    trace: TracedTrajectory,
    *,
    domain: str,
    token_scale: float,
    tool_scale: float,
    max_context_tokens: int,
    sample_index: int = 0,
) -> PlannedTrajectory:
    """A replayable recorded trajectory as a planned one, under its own ids, fitted by `fit_into_context`.

    Raises
    ------
    PromptDoesNotFit
        The prompt leaves no room for a generated token.
    """
    generated = [step.generated_tokens or 0 for step in trace.steps]
    # A replay neither reads the last observation nor waits for the tool after the last step, nor for a person.
    observed = [step.observation_tokens or 0 for step in trace.steps[:-1]] + [0]
    tools = [step.tool for step in trace.steps[:-1]] + [None]
    waits = [0.0 if step.tool is None or step.human else step.tool_s or 0.0 for step in trace.steps[:-1]] + [0.0]
    whole = PlannedTrajectory(
        trace.trajectory_id,
        trace.group_id,
        sample_index,
        joined_domain(domain, trace.kind),
        trace.prompt_tokens or 0,
        tuple(PlannedStep(*each) for each in zip(generated, observed, tools, waits, strict=True)),
        message_tokens=trace.message_tokens or 0,
        max_steps=trace.max_steps,
    )
    return fit_into_context(
        whole, token_scale=token_scale, tool_scale=tool_scale, max_context_tokens=max_context_tokens
    )


def fit_into_context(
    planned: PlannedTrajectory, *, token_scale: float, tool_scale: float, max_context_tokens: int
) -> PlannedTrajectory:
    """Scale a trajectory, and end it where its context is full.

    All that comes before is as without a limit: nothing of a trajectory depends on what it would still have generated.
    A step is cut to the room that is left. An observation is cut so that one token can follow it, the last one.

    Raises
    ------
    PromptDoesNotFit
        The prompt leaves no room for a generated token.
    """
    prompt = scaled_tokens(planned.prompt_tokens, token_scale, 1)
    room = max_context_tokens - prompt
    if room < 1:
        raise PromptDoesNotFit(
            f"trajectory {planned.trajectory_id}: a prompt of {prompt} tokens fills a context of "
            f"{max_context_tokens}; use a smaller token_scale or a longer context"
        )
    if token_scale == tool_scale == 1.0 and planned.context_tokens <= max_context_tokens:
        return planned  # the common case, not copied: there may be a hundred thousand
    steps: list[PlannedStep] = []
    for step in planned.steps:
        generated = min(room, scaled_tokens(step.generated_tokens, token_scale, 1))
        room -= generated
        observed = min(max(0, room - 1), scaled_tokens(step.observation_tokens, token_scale, 0))
        room -= observed
        steps.append(PlannedStep(generated, observed, step.tool, step.tool_s * tool_scale))
        if room < 1:
            break
    steps[-1] = PlannedStep(steps[-1].generated_tokens, 0, None, 0.0)
    return PlannedTrajectory(
        trajectory_id=planned.trajectory_id,
        group_id=planned.group_id,
        sample_index=planned.sample_index,
        domain=planned.domain,
        prompt_tokens=prompt,
        steps=tuple(steps),
        message_tokens=scaled_tokens(planned.message_tokens, token_scale, 0),
        max_steps=planned.max_steps,
        prompt_key=planned.prompt_key,
    )


def scaled_tokens(tokens: int, scale: float, least: int) -> int:
    """`tokens` times `scale`, rounded, at least `least`."""
    return max(least, round(tokens * scale))
