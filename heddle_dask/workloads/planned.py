"""Planned trajectories: the tokens of every step, and the observation and seconds of every tool call.

A replay, live or simulated, follows such a plan. This module makes plans from recorded trajectories; generators make
synthetic ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.duration_profile import DurationProfile
from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import joined_domain
from heddle_dask.core.resources import ONE_CPU, ResourceDemand
from heddle_dask.workloads.traces import TracedTrajectory


class TraceDoesNotFit(BadInput):
    """The generated tokens alone exceed the engine's context; the message says by how many, and what to do."""


@dataclass(frozen=True, slots=True)
class PlannedAction:
    """One tool or reward call with everything that decides how long it takes.

    Attributes
    ----------
    label
        Name of the tool.
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

    @property
    def shortest_s(self) -> float:
        """Seconds with as many units as it can be granted."""
        elastic = self.demand.elastic
        return self.profile.seconds(self.demand[elastic].most if elastic else 1)


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
    submitted_s
        When a simulation submits it.
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

    @property
    def generated_tokens(self) -> int:
        """Sampled tokens over all steps."""
        return sum(step.generated_tokens for step in self.steps)

    @property
    def context_tokens(self) -> int:
        """Length of the context at the end."""
        observed = sum(step.observation_tokens for step in self.steps)
        return self.prompt_tokens + self.generated_tokens + observed

    @property
    def tools_s(self) -> float:
        """Tool seconds between the steps."""
        return sum(step.tool_s for step in self.steps if step.tool is not None)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A trajectory to replay, fitted into a context.

    Attributes
    ----------
    clipped_tokens
        Prompt and observation tokens that were removed to fit.
    """

    prompt_tokens: int
    steps: tuple[PlannedStep, ...]
    clipped_tokens: int

    @property
    def context_tokens(self) -> int:
        """Length of the context at the end, the last step's tokens included."""
        return self.prompt_tokens + sum(
            step.generated_tokens + step.observation_tokens for step in self.steps
        )


def is_replayable(trace: TracedTrajectory) -> bool:
    """True if all token counts that a replay needs are known. A replay does not need the last observation."""
    return (
        trace.prompt_tokens is not None
        and all(step.generated_tokens is not None for step in trace.steps)
        and all(step.observation_tokens is not None for step in trace.steps[:-1])
    )


def plan_replay(
    trace: TracedTrajectory, *, token_scale: float, tool_scale: float, max_context_tokens: int
) -> ReplayPlan:
    """Scale a replayable trajectory and clip prompt and observations, evenly, to fit the context.

    Generated tokens are scaled, to at least 1 a step, but never clipped.

    Raises
    ------
    TraceDoesNotFit
        The generated tokens leave no room for a prompt of one token.
    """
    generated = [scaled_tokens(step.generated_tokens, token_scale, 1) for step in trace.steps]
    # A replay neither reads the last observation nor waits for the tool after the last step.
    observed = [scaled_tokens(step.observation_tokens, token_scale, 0) for step in trace.steps[:-1]] + [0]
    prompt = scaled_tokens(trace.prompt_tokens, token_scale, 1)
    room = max_context_tokens - sum(generated)
    if room < 1:
        raise TraceDoesNotFit(
            f"trajectory {trace.trajectory_id}: {sum(generated)} tokens to generate do not fit into "
            f"a context of {max_context_tokens}; use a smaller token_scale or a longer context"
        )
    wanted = prompt + sum(observed)
    if wanted > room:
        observed = [tokens * room // wanted for tokens in observed]
        prompt = max(1, prompt * room // wanted)
        if prompt + sum(observed) > room:  # only if the prompt was raised to 1
            observed[observed.index(max(observed))] -= 1
    tools = [step.tool for step in trace.steps[:-1]] + [None]
    waits = tool_waits_s(trace, tool_scale)
    return ReplayPlan(
        prompt_tokens=prompt,
        steps=tuple(PlannedStep(*each) for each in zip(generated, observed, tools, waits, strict=True)),
        clipped_tokens=wanted - prompt - sum(observed),
    )


def tool_waits_s(trace: TracedTrajectory, tool_scale: float) -> list[float]:
    """Seconds that a replay waits for a tool after each step; 0 for waits for a person and after the last step."""
    waits = [
        0.0 if step.tool is None or step.human or step.tool_s is None else step.tool_s * tool_scale
        for step in trace.steps[:-1]
    ]
    return [*waits, 0.0]


def planned_trace(
    trace: TracedTrajectory,
    *,
    domain: str,
    token_scale: float,
    tool_scale: float,
    max_context_tokens: int,
    sample_index: int = 0,
) -> PlannedTrajectory:
    """A recorded trajectory as a planned one, under its own ids; see `plan_replay`.

    Raises
    ------
    TraceDoesNotFit
        The generated tokens leave no room for a prompt of one token.
    """
    plan = plan_replay(
        trace, token_scale=token_scale, tool_scale=tool_scale, max_context_tokens=max_context_tokens
    )
    return PlannedTrajectory(
        trace.trajectory_id,
        trace.group_id,
        sample_index,
        joined_domain(domain, trace.kind),
        plan.prompt_tokens,
        plan.steps,
        message_tokens=scaled_tokens(trace.message_tokens, token_scale, 0),
        max_steps=trace.max_steps,
    )


def scaled_tokens(tokens: int | None, scale: float, least: int) -> int:
    """`tokens` times `scale`, rounded, at least `least`."""
    assert tokens is not None, "only replayable trajectories are planned"
    return max(least, round(tokens * scale))
