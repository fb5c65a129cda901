"""Remaining demand of a trajectory in tokens, with tool seconds converted to tokens.

The unit of tokens and tool seconds is the time of one token of a trajectory on a busy engine (`EngineCosts.pace_s`).
A trajectory that spends most of its time in tools generates few tokens; it may still end last if it starts late, and
it holds its memory for longer than its tokens alone would.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from heddle_dask.core.entities import Trajectory
from heddle_dask.strategies.remaining import remaining_lengths


class RemainingDemand(NamedTuple):
    """Demand of a trajectory from now to its end.

    Attributes
    ----------
    tokens
        Mean remaining tokens.
    lengths
        Remaining tokens as equally likely lengths, ascending.
    stretch
        Mean time of tokens and tools over that of the tokens; at least 1.
    context_tokens
        Context tokens now.
    growth
        Context tokens added per generated token.
    tools_s
        Seconds of tool calls still to come.
    """

    tokens: float
    lengths: tuple[float, ...]
    stretch: float = 1.0
    context_tokens: float = 0.0
    growth: float = 1.0
    tools_s: float = 0.0


def tools_left_s(trajectory: Trajectory) -> float:
    """Seconds of tool calls still to come; 0 when unknown."""
    said = trajectory.prediction
    if said is None or said.tools_s <= 0:
        return 0.0
    run_s = trajectory.tools_s - trajectory.predicted_at_tools_s
    return max(0.0, said.tools_s - run_s)


def tools_left(trajectory: Trajectory, pace_s: float) -> float:
    """Tokens that take as long as the tool calls still to come; 0 when unknown."""
    return tools_left_s(trajectory) / pace_s


def demand_of(
    trajectory: Trajectory,
    count: int,
    pace_s: float | None,
    growth: float = 1.0,
    unseen_tokens: float = 0.0,
    most_tokens: float = math.inf,
) -> RemainingDemand:
    """The remaining demand of a trajectory, with at most `count` lengths (`remaining.remaining_lengths`).

    Parameters
    ----------
    pace_s
        Seconds per token; None: tools take no time.
    growth
        Context tokens added per generated token.
    unseen_tokens
        Estimated tokens that its running step has sampled (`running_step`).
    most_tokens
        The longest context that engines take: a trajectory ends there. One predicted length beyond it would keep an
        engine for itself, or postpone a deadline, for nothing.
    """
    tokens, lengths = remaining_lengths(trajectory, count, unseen_tokens)
    context = max(trajectory.context_tokens, trajectory.spec.prompt_tokens) + unseen_tokens
    room = max(0.0, most_tokens - context)
    if lengths[-1] > room:
        lengths = tuple([min(length, room) for length in lengths])
        tokens = min(tokens, sum(lengths) / len(lengths))
    tools_s = 0.0 if pace_s is None or tokens <= 0 else tools_left_s(trajectory)
    stretch = 1.0 if pace_s is None or tools_s <= 0 else 1.0 + tools_s / pace_s / tokens
    return RemainingDemand(tokens, lengths, stretch, context, growth, tools_s)
