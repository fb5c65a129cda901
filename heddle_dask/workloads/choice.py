"""Loads a workload of a given size, by name or by file, and computes its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.bootstrap import bootstrap
from heddle_dask.workloads.planned import PlannedTrajectory, fit_into_context
from heddle_dask.workloads.recorded import RECORDED
from heddle_dask.workloads.synthetic import WORKLOADS, synthesize


def load_workload(
    name_or_file: str | Path,
    *,
    trajectories: int,
    samples: int,
    seed: int,
    token_scale: float = 1.0,
    tool_scale: float = 1.0,
    max_context_tokens: int,
) -> list[PlannedTrajectory]:
    """`trajectories` trajectories that fit into a context.

    Parameters
    ----------
    name_or_file
        "coding", "search" or "math" (`synthetic`), or a trace (`bootstrap`): the name of a recorded one
        (`recorded.RECORDED`) or the path of a file.
    samples
        Trajectories per prompt of a synthetic workload; at least 1. Ignored for a file, which has its own groups.
    token_scale, tool_scale
        Factors on all token counts, including caps, and on all tool seconds.
    max_context_tokens
        A synthetic trajectory ends when its context is full; a recorded one loses prompt and observation tokens.

    Raises
    ------
    BadInput
        There is no such workload or file, it is empty, does not fit, or a number is out of range.
    """
    name = str(name_or_file)
    _check_numbers(name, trajectories, samples, seed, token_scale, tool_scale, max_context_tokens)
    if name not in WORKLOADS:
        if name not in RECORDED and not Path(name_or_file).is_file():
            allowed = ", ".join((*WORKLOADS, *RECORDED))
            raise BadInput(f"workload {name!r}: neither one of {allowed} nor a trace file that is there")
        return bootstrap(
            name_or_file,
            trajectories=trajectories,
            seed=seed,
            token_scale=token_scale,
            tool_scale=tool_scale,
            max_context_tokens=max_context_tokens,
        )
    if trajectories % samples:
        raise BadInput(
            f"workload {name!r}: {trajectories} trajectories are no multiple of {samples} samples a prompt; "
            f"give {math.ceil(trajectories / samples) * samples}"
        )
    return [
        fit_into_context(one, token_scale=token_scale, tool_scale=tool_scale, max_context_tokens=max_context_tokens)
        for one in synthesize(name, prompts=trajectories // samples, samples=samples, seed=seed)
    ]


def _check_numbers(
    name: str,
    trajectories: int,
    samples: int,
    seed: int,
    token_scale: float,
    tool_scale: float,
    max_context_tokens: int,
) -> None:
    for what, number, least in (
        ("trajectories", trajectories, 1),
        ("samples", samples, 1),
        ("seed", seed, 0),
        ("max_context_tokens", max_context_tokens, 2),
    ):
        if number < least:
            raise BadInput(f"workload {name!r}: {what} is {number}, give {least} or more")
    if not (math.isfinite(token_scale) and token_scale > 0):
        raise BadInput(f"workload {name!r}: token_scale is {token_scale!r}, give a number greater than 0")
    if not (math.isfinite(tool_scale) and tool_scale >= 0):
        raise BadInput(f"workload {name!r}: tool_scale is {tool_scale!r}, give a number from 0 up")


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, quantiles and maximum of some numbers; all 0 if there are none."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class WorkloadStatistics:
    """Statistics of a workload.

    Attributes
    ----------
    prompt_tokens, output_tokens, context_tokens, steps
        Per trajectory; output: generated tokens; context: at the end.
    tool_s, observation_tokens
        Per tool call.
    slowest_over_median
        Largest over median of output tokens times `token_s` plus tool seconds.
    prefilled_per_generated
        Prompt and observation tokens over generated tokens, all trajectories together.
    between_share
        Share of the variance of log output tokens that lies between groups, by one-way analysis of variance over
        groups of 2 or more; None with fewer than two of them, or without variance.
    """

    trajectories: int
    groups: int
    prompt_tokens: Summary
    output_tokens: Summary
    context_tokens: Summary
    steps: Summary
    tool_s: Summary
    observation_tokens: Summary
    max_over_mean: float
    slowest_over_median: float
    prefilled_per_generated: float
    between_share: float | None


def statistics(planned: Sequence[PlannedTrajectory], *, token_s: float = 0.028) -> WorkloadStatistics:
    """Statistics of a workload.

    Parameters
    ----------
    token_s
        Seconds a generated token for `slowest_over_median`. 0.028 is the median published for Qwen3-14B on one H100
        with 59 requests (ML.ENERGY leaderboard); queueing and batching change it in a real rollout.

    Raises
    ------
    BadInput
        There is no trajectory.
    """
    if not planned:
        raise BadInput("statistics of a workload without trajectories; give one or more")
    output = np.array([one.generated_tokens for one in planned], dtype=np.float64)
    context = np.array([one.context_tokens for one in planned], dtype=np.float64)
    alone_s = output * token_s + np.array([one.tools_s for one in planned])
    calls = [step for one in planned for step in one.steps if step.tool is not None]
    groups: dict[str, list[float]] = {}
    for one, tokens in zip(planned, output.tolist(), strict=True):
        groups.setdefault(one.group_id, []).append(math.log(tokens))
    return WorkloadStatistics(
        trajectories=len(planned),
        groups=len(groups),
        prompt_tokens=_summary(np.array([one.prompt_tokens for one in planned], dtype=np.float64)),
        output_tokens=_summary(output),
        context_tokens=_summary(context),
        steps=_summary(np.array([len(one.steps) for one in planned], dtype=np.float64)),
        tool_s=_summary(np.array([step.tool_s for step in calls], dtype=np.float64)),
        observation_tokens=_summary(np.array([step.observation_tokens for step in calls], dtype=np.float64)),
        max_over_mean=float(output.max() / output.mean()),
        slowest_over_median=float(alone_s.max() / np.median(alone_s)),
        prefilled_per_generated=float((context.sum() - output.sum()) / output.sum()),
        between_share=_between_share(list(groups.values())),
    )


def _summary(numbers: NDArray[np.float64]) -> Summary:
    if not numbers.size:
        return Summary(0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99, largest = (float(one) for one in np.quantile(numbers, [0.5, 0.9, 0.99, 1.0]))
    return Summary(float(numbers.mean()), p50, p90, p99, largest)


def _between_share(groups: Sequence[Sequence[float]]) -> float | None:
    """Intraclass correlation by one-way analysis of variance for groups of unequal sizes (Searle), at least 0."""
    arrays = [np.array(group) for group in groups if len(group) > 1]
    if len(arrays) < 2:
        return None
    sizes = np.array([len(array) for array in arrays])
    count = int(sizes.sum())
    means = np.array([array.mean() for array in arrays])
    grand = float((sizes * means).sum() / count)
    within = sum(float(((array - array.mean()) ** 2).sum()) for array in arrays) / (count - len(arrays))
    between = float((sizes * (means - grand) ** 2).sum()) / (len(arrays) - 1)
    usual_size = (count - float((sizes**2).sum()) / count) / (len(arrays) - 1)
    variance = max(0.0, (between - within) / usual_size)
    return None if variance + within == 0 else variance / (variance + within)
