"""How long a trajectory will be there, in tokens: those that it generates, and those for which its tools take as long.

One unit for both: the time in which a busy engine samples a token for one trajectory (`EngineCosts.pace_s`). Who waits
for tools most of its time generates little, and ends last all the same if it starts late; and it holds its memory for
longer than its tokens tell.
"""

from __future__ import annotations

from typing import NamedTuple

from heddle_dask.core.entities import Trajectory
from heddle_dask.strategies.remaining import left_now


class Stay(NamedTuple):
    """From now to the end.

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
    """Seconds of tools that it will still call, as far as anybody knows."""
    said = trajectory.prediction
    if said is None or said.tools_s <= 0:
        return 0.0
    run_s = trajectory.tools_s - trajectory.predicted_at_tools_s
    return max(0.0, said.tools_s - run_s)


def tools_left(trajectory: Trajectory, pace_s: float) -> float:
    """Tokens that take as long as the tools that it will still call, as far as anybody knows."""
    return tools_left_s(trajectory) / pace_s


def stay_of(
    trajectory: Trajectory,
    count: int,
    pace_s: float | None,
    growth: float = 1.0,
    unseen_tokens: float = 0.0,
) -> Stay:
    """By at most `count` lengths (`remaining.left_now`).

    Parameters
    ----------
    pace_s
        Seconds of a token; without it tools are taken to need no time.
    growth
        Context tokens that come with each generated one.
    unseen_tokens
        Those that its running step has sampled by now (`running_step`).
    """
    tokens, lengths = left_now(trajectory, count, unseen_tokens)
    tools_s = 0.0 if pace_s is None or tokens <= 0 else tools_left_s(trajectory)
    stretch = 1.0 if pace_s is None or tools_s <= 0 else 1.0 + tools_s / pace_s / tokens
    context = max(trajectory.context_tokens, trajectory.spec.prompt_tokens) + unseen_tokens
    return Stay(tokens, lengths, stretch, context, growth, tools_s)
