"""Trajectories with tool and reward calls like those of ARL-Tangram's coding workload, from a seed.

An agent works in a sandbox over tens of turns; each turn runs one command on one CPU. At the end a reward runs the
project's tests, which can use many CPUs. `ACTION_SOURCES` has the origin of every number; those without a published
value are assumptions, and `benchmarks.actions` sweeps them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import DurationProfile
from heddle_dask.core.resources import Amounts, ResourceDemand
from heddle_dask.workloads.planned import PlannedAction, PlannedStep, PlannedTrajectory
from heddle_dask.workloads.synthetic import WORKLOADS, WorkloadParameters, synthesize

SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True)
class SoftwareWorkload:
    """Numbers of a workload of software tasks; `ACTION_SOURCES` has the origin of each.

    Attributes
    ----------
    steps_median, steps_max
        LLM steps of a trajectory of median length, and the most.
    output_median_tokens
        Generated tokens of a median trajectory.
    command_mean_s, command_log_sd
        Seconds of a command in the sandbox, which uses one CPU: log-normal, at least `SHORTEST_S`.
    tests_mean_s, tests_log_sd, tests_most_s
        CPU seconds of the tests of a reward: log-normal with this mean before it is cut at the most.
    tests_most_cpus, serial_share
        The most CPUs that the tests can use, and the share of their CPU seconds that only one can.
    profiles
        What the reward declares of its duration: ``"true"``, ``"none"``, or ``"wrong"``: its seconds are too long or
        too short by `wrong_factor`, each with probability one half.
    wrong_factor
        See `profiles`.
    memory_bytes
        Memory of a sandbox.
    pool
        Pool of the actions.
    name
        Domain of the trajectories, and part of their names.
    """

    steps_median: float = 25.0
    steps_max: int = 50
    output_median_tokens: int = 5_000
    command_mean_s: float = 1.0
    command_log_sd: float = 1.28
    tests_mean_s: float = 60.0
    tests_log_sd: float = 1.2
    tests_most_s: float = 1_800.0
    tests_most_cpus: int = 32
    serial_share: float = 0.02
    profiles: str = "true"
    wrong_factor: float = 2.0
    memory_bytes: int = 4 * 2**30
    pool: str = "cpu"
    name: str = "software"

    def __post_init__(self) -> None:
        numbers = (self.command_mean_s, self.tests_mean_s, self.tests_most_s, self.wrong_factor)
        if min(numbers) <= 0 or not 0 <= self.serial_share <= 1 or self.tests_most_cpus < 1:
            raise BadInput(f"workload {self.name!r}: durations must be above 0, and a serial share from 0 to 1")
        if self.profiles not in ("true", "none", "wrong"):
            raise BadInput(f"workload {self.name!r}: profiles is {self.profiles!r}: use true, none or wrong")


ACTION_SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "steps_median": "assumption: half of the upper end of RollArt's Table 1 for coding (50, second-hand); swept",
        "steps_max": "RollArt's Table 1, as the synthetic workloads",
        "output_median_tokens": "about 200 tokens a step, as the recorded coding agents generate (151 and 214)",
        "command_mean_s": "ARL-Tangram Table 1: an action of its coding workload runs 0.975 s on average; swept",
        "command_log_sd": "recorded test and build commands: 1.22 to 1.34; from 1 ms on: ARL-Tangram section 2",
        "tests_mean_s": "assumption, swept from 15 to 240 s. 500 tasks of SWE-bench Verified took 62 minutes on 32 "
        "cores (epoch.ai/blog/swebench-docker): at most 238 CPU seconds a task with everything else in it",
        "tests_log_sd": "as of the recorded test commands; ARL-Tangram calls rewards long-tailed",
        "tests_most_s": "time limit of the evaluation harness of SWE-bench (1,800 s)",
        "tests_most_cpus": "ARL-Tangram section 6: rewards run with 1 to 32 CPUs",
        "serial_share": "assumption, swept from 0 to 0.1",
        "memory_bytes": "assumption: half of what ROCK gives a sandbox (8 GB); 1,536 of them fit on the five nodes",
        "profiles": "ARL-Tangram section 6: only rewards are profiled",
    }
)


def action_trajectories(
    workload: SoftwareWorkload, *, trajectories: int, samples: int, seed: int, max_context_tokens: int
) -> list[PlannedTrajectory]:
    """Trajectories of this workload; group number i is the same for every number of trajectories.

    Raises
    ------
    BadInput
        The trajectories are no multiple of the samples of a prompt, or a number is out of range.
    """
    if samples < 1 or trajectories < 1 or trajectories % samples:
        raise BadInput(f"workload {workload.name!r}: {trajectories} trajectories of {samples} samples a prompt")
    parameters = _parameters(workload)
    plans = synthesize(parameters, prompts=trajectories // samples, samples=samples, seed=seed)
    return [_with_actions(workload, _cut(plan, max_context_tokens), seed) for plan in plans]


def _parameters(workload: SoftwareWorkload) -> WorkloadParameters:
    """The synthetic coding workload with the turns and the commands of this one."""
    return replace(
        WORKLOADS["coding"],
        name=workload.name,
        output_median_tokens=workload.output_median_tokens,
        steps_median=workload.steps_median,
        steps_max=workload.steps_max,
        tool_mean_s=workload.command_mean_s,
        tool_log_sd=workload.command_log_sd,
        tools=("command",),
    )


def _cut(plan: PlannedTrajectory, max_context_tokens: int) -> PlannedTrajectory:
    """End a trajectory when its context is full."""
    tokens, kept = plan.prompt_tokens, 0
    for step in plan.steps:
        tokens += step.generated_tokens + step.observation_tokens
        if tokens > max_context_tokens:
            break
        kept += 1
    if kept == len(plan.steps):
        return plan
    steps = list(plan.steps[: max(1, kept)])
    steps[-1] = PlannedStep(steps[-1].generated_tokens, 0, None, 0.0)
    return replace(plan, steps=tuple(steps))


def _with_actions(workload: SoftwareWorkload, plan: PlannedTrajectory, seed: int) -> PlannedTrajectory:
    steps = tuple(step if step.tool is None else _with_command(workload, step) for step in plan.steps)
    # One generator a trajectory: the tests of one do not depend on how many there are.
    rng = np.random.default_rng([seed, *plan.trajectory_id.encode()])
    mean_s, log_sd = workload.tests_mean_s, workload.tests_log_sd
    drawn_s = mean_s * math.exp(log_sd * float(rng.standard_normal()) - log_sd**2 / 2)
    true = DurationProfile(min(max(drawn_s, SHORTEST_S), workload.tests_most_s), workload.serial_share)
    factor = workload.wrong_factor if float(rng.random()) < 0.5 else 1 / workload.wrong_factor
    declared = {"true": true, "none": None, "wrong": replace(true, one_unit_s=true.one_unit_s * factor)}
    most = workload.tests_most_cpus
    reward = PlannedAction(
        "tests",
        true,
        ResourceDemand.of(cpus=Amounts(1, most)),
        kind="reward",
        pool=workload.pool,
        in_sandbox=True,
        sandbox_bytes=workload.memory_bytes,
        declared=declared[workload.profiles],
    )
    return replace(plan, steps=steps, rewards=(reward,))


def _with_command(workload: SoftwareWorkload, step: PlannedStep) -> PlannedStep:
    seconds = max(SHORTEST_S, step.tool_s)
    assert step.tool is not None
    action = PlannedAction(
        step.tool,
        DurationProfile(seconds, 1.0),
        pool=workload.pool,
        in_sandbox=True,
        sandbox_bytes=workload.memory_bytes,
    )
    return replace(step, tool_s=seconds, action=action)
