"""What a trajectory still needs of an engine, in tokens: those it generates, and those that its tools take as long as.

Tokens and tool seconds have one unit: the time in which a busy engine samples a token for one trajectory
(`EngineCosts.pace_s`). A trajectory that spends most of its time in tools generates little; it still ends last if it
starts late, and it holds its memory for longer than its tokens tell.
"""

from __future__ import annotations

from typing import NamedTuple

from heddle_dask.core.entities import Trajectory
from heddle_dask.strategies.remaining import remaining_lengths


class RemainingDemand(NamedTuple):
    """From now to the end of a trajectory.

    Attributes
    ----------
    tokens
        What is left to generate, in the mean.
    lengths
        The same as equally likely lengths, ascending.
    stretch
        Tokens and tools over tokens, in the mean: at least 1.
    context_tokens
        Tokens in front of the model now.
    growth
        Context tokens that come with each generated one.
    tools_s
        Seconds of tools that are still to come.
    """

    tokens: float
    lengths: tuple[float, ...]
    stretch: float = 1.0
    context_tokens: float = 0.0
    growth: float = 1.0
    tools_s: float = 0.0


def tools_left_s(trajectory: Trajectory) -> float:
    """Seconds of tools that the trajectory will still call; 0 when unknown."""
    said = trajectory.prediction
    if said is None or said.tools_s <= 0:
        return 0.0
    run_s = trajectory.tools_s - trajectory.predicted_at_tools_s
    return max(0.0, said.tools_s - run_s)


def tools_left(trajectory: Trajectory, pace_s: float) -> float:
    """Tokens that take as long as the tools that the trajectory will still call; 0 when unknown."""
    return tools_left_s(trajectory) / pace_s


def demand_of(
    trajectory: Trajectory,
    count: int,
    pace_s: float | None,
    growth: float = 1.0,
    unseen_tokens: float = 0.0,
) -> RemainingDemand:
    """What is left of a trajectory, by at most `count` lengths (`remaining.remaining_lengths`).

    Parameters
    ----------
    pace_s
        Seconds of a token; None takes tools to need no time.
    growth
        Context tokens that come with each generated one.
    unseen_tokens
        Tokens that its running step has sampled by now (`running_step`).
    """
    tokens, lengths = remaining_lengths(trajectory, count, unseen_tokens)
    tools_s = 0.0 if pace_s is None or tokens <= 0 else tools_left_s(trajectory)
    stretch = 1.0 if pace_s is None or tools_s <= 0 else 1.0 + tools_s / pace_s / tokens
    context = max(trajectory.context_tokens, trajectory.spec.prompt_tokens) + unseen_tokens
    return RemainingDemand(tokens, lengths, stretch, context, growth, tools_s)
