"""Synthetic trajectories like those of Heddle's evaluation: coding, search and math, from a seed.

The paper (arXiv 2603.28101v1) gives few numbers: mean tool times, 16 samples per prompt, a cap of 40K output tokens,
and the shape (right skew of tokens and of tool times, wide spread inside a group, slowest over median completion above
4). Everything else is an assumption of this package; benchmarks/synthetic_workloads.md has the origin of each.

The model. The log of a trajectory's output tokens is the log median plus a normal term of the prompt and a normal term
of the sample. A share of the trajectories is stretched by a Pareto factor (repair loops after a failed test). All are
cut at the cap. The number of steps grows with a power of the tokens, with its own noise. Tool times and observations
are log-normal and independent.

Prompt number i depends on the workload, the seed, i and the number of samples, not on the number of prompts. Draws are
the same in every process; another version of numpy may draw other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.planned import PlannedStep, PlannedTrajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadParameters:
    """All numbers behind one synthetic workload: the defaults of all named ones, and its own
    (benchmarks/synthetic_workloads.md).

    Attributes
    ----------
    name
        Name of the workload, and domain of its trajectories.
    output_median_tokens
        Median of the generated tokens of a trajectory, before tail and cap.
    prompt_log_sd, sample_log_sd
        Standard deviations of the log of the output tokens between prompts, and between samples of one prompt.
    tail_share, tail_exponent
        Share of the trajectories that are stretched, and exponent of the Pareto factor, which is at least 1.
    steps_median, steps_max
        Steps of a trajectory of median length, and the maximum.
    steps_elasticity, steps_log_sd
        Exponent with which steps grow with the tokens, and standard deviation of the noise of their log.
    step_variation
        Coefficient of variation of the tokens of one trajectory's steps (gamma weights).
    prompt_mean_tokens, prompt_tokens_log_sd
        Mean and log standard deviation of the prompt's tokens, one draw per group.
    tool_mean_s, tool_log_sd
        Mean seconds of one tool call, and their log standard deviation.
    observation_mean_tokens, observation_log_sd
        Mean tokens that one tool call adds, and their log standard deviation.
    tools
        Labels of the tools, drawn with equal probability.
    """

    name: str
    output_median_tokens: int
    prompt_log_sd: float = 0.5
    sample_log_sd: float = 0.7
    tail_share: float = 0.05
    tail_exponent: float = 1.5
    steps_median: float
    steps_max: int
    steps_elasticity: float = 0.65
    steps_log_sd: float = 0.55
    step_variation: float = 0.9
    prompt_mean_tokens: int
    prompt_tokens_log_sd: float
    tool_mean_s: float
    tool_log_sd: float
    observation_mean_tokens: int
    observation_log_sd: float
    tools: tuple[str, ...]

    def __post_init__(self) -> None:
        counts = (self.output_median_tokens, self.steps_max, self.prompt_mean_tokens, len(self.tools))
        positive = (self.tail_exponent, self.steps_median, self.step_variation)
        spreads = (self.prompt_log_sd, self.sample_log_sd, self.steps_log_sd, self.prompt_tokens_log_sd)
        from_zero = (*spreads, self.tool_mean_s, self.tool_log_sd, self.observation_log_sd)
        good = min(counts) >= 1 and min(positive) > 0 and min(from_zero) >= 0 and 0 <= self.tail_share <= 1
        if not good or self.observation_mean_tokens < 0:
            raise BadInput(
                f"parameters of workload {self.name!r}: a count is below 1, a spread, mean or share below 0, a share "
                "above 1, or tail_exponent, steps_median or step_variation not above 0"
            )


WORKLOADS: Mapping[str, WorkloadParameters] = MappingProxyType(
    {
        "coding": WorkloadParameters(
            name="coding",
            output_median_tokens=5_000,
            steps_median=5.0,
            steps_max=50,
            prompt_mean_tokens=900,
            prompt_tokens_log_sd=0.4,
            tool_mean_s=0.44,
            tool_log_sd=1.3,
            observation_mean_tokens=575,
            observation_log_sd=1.0,
            tools=("run_code", "run_tests", "check_format"),
        ),
        "search": WorkloadParameters(
            name="search",
            output_median_tokens=1_600,
            steps_median=8.0,
            steps_max=30,
            prompt_mean_tokens=300,
            prompt_tokens_log_sd=0.2,
            tool_mean_s=1.42,
            tool_log_sd=1.1,
            observation_mean_tokens=1_000,
            observation_log_sd=0.7,
            tools=("web_search",),
        ),
        "math": WorkloadParameters(
            name="math",
            output_median_tokens=5_000,
            steps_median=4.0,
            steps_max=16,
            prompt_mean_tokens=350,
            prompt_tokens_log_sd=0.3,
            tool_mean_s=0.05,
            tool_log_sd=1.0,
            observation_mean_tokens=40,
            observation_log_sd=1.0,
            tools=("calculator", "solver"),
        ),
    }
)


def synthesize(
    workload: str | WorkloadParameters,
    *,
    prompts: int,
    samples: int = 16,
    seed: int,
    max_output_tokens: int = 40_000,
) -> list[PlannedTrajectory]:
    """`prompts` groups of `samples` trajectories, group by group.

    Parameters
    ----------
    workload
        "coding", "search" or "math", or other parameters.
    samples
        Trajectories per prompt; 16 in the paper (7.2).
    max_output_tokens
        Maximum of a trajectory over all its steps; 40K in the paper (7.2), taken as a limit per trajectory.

    Raises
    ------
    BadInput
        There is no such workload, a count is below 1, or the seed is negative.
    """
    parameters = _parameters(workload)
    for what, number, least in (
        ("prompts", prompts, 1),
        ("samples", samples, 1),
        ("max_output_tokens", max_output_tokens, 1),
        ("seed", seed, 0),
    ):
        if number < least:
            raise BadInput(f"workload {parameters.name!r}: {what} is {number}, give {least} or more")
    planned: list[PlannedTrajectory] = []
    for prompt in range(prompts):
        planned += _group(parameters, prompt, samples, seed, max_output_tokens)
    return planned


def _parameters(workload: str | WorkloadParameters) -> WorkloadParameters:
    if isinstance(workload, WorkloadParameters):
        return workload
    if workload not in WORKLOADS:
        raise BadInput(f"workload {workload!r} is not known; choose one of {', '.join(WORKLOADS)}")
    return WORKLOADS[workload]


def _group(
    parameters: WorkloadParameters, prompt: int, samples: int, seed: int, max_output_tokens: int
) -> list[PlannedTrajectory]:
    name = parameters.name
    # One generator per prompt, so that more prompts do not change the first ones. The seed contains the name's bytes:
    # Python's `hash` of a string differs between processes.
    rng = np.random.default_rng([seed, int.from_bytes(name.encode(), "big"), prompt])
    prompt_tokens = _log_normal(rng, parameters.prompt_mean_tokens, parameters.prompt_tokens_log_sd, 1).tolist()
    outputs = _output_tokens(rng, parameters, samples, max_output_tokens)
    counts = _step_counts(rng, parameters, outputs)
    group_id = f"{name}-{seed}-{prompt}"
    each_steps = _steps(rng, parameters, outputs, counts)
    return [
        PlannedTrajectory(
            trajectory_id=f"{group_id}-{index}",
            group_id=group_id,
            sample_index=index,
            domain=name,
            prompt_tokens=max(1, round(prompt_tokens[0])),
            steps=steps,
        )
        for index, steps in enumerate(each_steps)
    ]


def _output_tokens(
    rng: np.random.Generator, parameters: WorkloadParameters, samples: int, cap: int
) -> NDArray[np.int64]:
    log_tokens = (
        math.log(parameters.output_median_tokens)
        + parameters.prompt_log_sd * rng.standard_normal()
        + parameters.sample_log_sd * rng.standard_normal(samples)
    )
    stretched = rng.random(samples) < parameters.tail_share
    # The log of a Pareto factor is exponential.
    log_tokens += stretched * rng.standard_exponential(samples) / parameters.tail_exponent
    tokens: NDArray[np.int64] = np.rint(np.exp(np.minimum(log_tokens, math.log(cap)))).astype(np.int64)
    return np.clip(tokens, 1, cap)


def _step_counts(
    rng: np.random.Generator, parameters: WorkloadParameters, outputs: NDArray[np.int64]
) -> NDArray[np.int64]:
    log_steps = (
        math.log(parameters.steps_median)
        + parameters.steps_elasticity * np.log(outputs / parameters.output_median_tokens)
        + parameters.steps_log_sd * rng.standard_normal(len(outputs))
    )
    most = np.minimum(parameters.steps_max, outputs)  # every step generates at least one token
    steps: NDArray[np.int64] = np.clip(np.rint(np.exp(log_steps)), 1, most).astype(np.int64)
    return steps


def _steps(
    rng: np.random.Generator,
    parameters: WorkloadParameters,
    outputs: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> list[tuple[PlannedStep, ...]]:
    """The steps of every trajectory of a group; all draws are vectorised for speed."""
    total = int(counts.sum())
    weights = rng.standard_gamma(parameters.step_variation**-2, total)
    tools_s = _log_normal(rng, parameters.tool_mean_s, parameters.tool_log_sd, total).tolist()
    drawn = _log_normal(rng, parameters.observation_mean_tokens, parameters.observation_log_sd, total)
    observed = np.maximum(1, np.rint(drawn)).astype(np.int64).tolist()
    labels = rng.integers(len(parameters.tools), size=total).tolist()
    result = []
    start = 0
    for output, count in zip(outputs.tolist(), counts.tolist(), strict=True):
        last = start + count - 1
        generated = _split(output, weights[start : last + 1])
        steps = [
            PlannedStep(generated[i - start], observed[i], parameters.tools[labels[i]], tools_s[i])
            for i in range(start, last)
        ]
        steps.append(PlannedStep(generated[-1], 0, None, 0.0))
        result.append(tuple(steps))
        start += count
    return result


def _split(tokens: int, weights: NDArray[np.float64]) -> list[int]:
    """Split `tokens` by weight into parts of at least 1; rounding the running sum keeps the total exact."""
    running = np.cumsum(weights)
    free = tokens - len(weights)
    bounds = np.rint(running * (free / running[-1])).astype(np.int64)
    shares: list[int] = (np.diff(bounds, prepend=0) + 1).tolist()
    return shares


def _log_normal(rng: np.random.Generator, mean: float, log_sd: float, size: int) -> NDArray[np.float64]:
    """Log-normal draws with the mean (not the median) `mean`."""
    return mean * np.exp(log_sd * rng.standard_normal(size) - log_sd**2 / 2)
