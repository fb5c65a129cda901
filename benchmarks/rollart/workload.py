"""RollArt's five tasks as synthetic workloads: turns as in its Table 1, tokens so that contexts stay below 32k.

Turns and the kind of load are the paper's (its section 2.1). Tokens, tool times and resets are assumptions, except
where a comment names a source; nothing is fitted to a ratio that the benchmark reports.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from benchmarks.rollart.training.environments import ResetTimes
from heddle_dask.core.nouns import DurationProfile
from heddle_dask.core.resources import ResourceDemand
from heddle_dask.workloads.planned import PlannedAction, PlannedTrajectory, fit_into_context
from heddle_dask.workloads.synthetic import WorkloadParameters, synthesize

CONTEXT_TOKENS = 32_768

# Spreads of tokens and steps as in `workloads.synthetic`, which names their sources.
_SPREAD = {
    "prompt_log_sd": 0.5,
    "sample_log_sd": 0.7,
    "tail_share": 0.05,
    "tail_exponent": 1.5,
    "steps_elasticity": 0.65,
    "step_variation": 0.9,
    "observation_log_sd": 0.8,
    "prompt_tokens_log_sd": 0.3,
}


def _task(name: str, **values: object) -> WorkloadParameters:
    return WorkloadParameters(name=name, tools=(f"{name}_step",), **{**_SPREAD, **values})  # type: ignore[arg-type]


TASKS: Mapping[str, WorkloadParameters] = MappingProxyType(
    {
        # 30 to 50 turns; about 200 tokens a turn, as recorded coding agents (151 and 214).
        "swe": _task(
            "swe",
            output_median_tokens=7_000,
            sample_log_sd=0.4,
            prompt_log_sd=0.3,
            steps_median=38.0,
            steps_max=50,
            steps_log_sd=0.15,
            prompt_mean_tokens=2_000,
            tool_mean_s=1.0,
            tool_log_sd=1.28,
            observation_mean_tokens=350,
        ),
        # 5 to 30 turns over pages.
        "webshop": _task(
            "webshop",
            output_median_tokens=1_600,
            steps_median=12.0,
            steps_max=30,
            steps_log_sd=0.4,
            prompt_mean_tokens=500,
            tool_mean_s=0.5,
            tool_log_sd=1.1,
            observation_mean_tokens=900,
        ),
        # 20 to 100 turns with short actions.
        "frozenlake": _task(
            "frozenlake",
            output_median_tokens=4_000,
            sample_log_sd=0.5,
            steps_median=40.0,
            steps_max=100,
            steps_log_sd=0.35,
            prompt_mean_tokens=400,
            tool_mean_s=0.1,
            tool_log_sd=1.0,
            observation_mean_tokens=200,
        ),
        # Fewer than 5 turns of long reasoning.
        "math": _task(
            "math",
            output_median_tokens=6_000,
            steps_median=2.0,
            steps_max=4,
            steps_log_sd=0.4,
            prompt_mean_tokens=350,
            tool_mean_s=0.05,
            tool_log_sd=1.0,
            observation_mean_tokens=60,
        ),
        # One turn.
        "game": _task(
            "game",
            output_median_tokens=3_000,
            steps_median=1.0,
            steps_max=1,
            steps_log_sd=0.1,
            prompt_mean_tokens=500,
            tool_mean_s=0.0,
            tool_log_sd=0.0,
            observation_mean_tokens=0,
        ),
    }
)

SMALL_MODEL_TASKS = ("webshop", "frozenlake", "math", "game")
"""RollArt trains SWE-bench with its 32B model only (section 7.1)."""

RESETS: Mapping[str, ResetTimes] = MappingProxyType(
    {
        # Fitted to good iterations: the slowest of 128 resets takes about 53 s (14.6 % of 366 s, RollArt, section 2.2).
        # Tail: one iteration of 128 in ten has a reset of hundreds of seconds (section 2.3).
        "swe": ResetTimes(18.0, 0.45, tail_share=0.0008, tail_s=220.0, tail_exponent=3.0),
        "webshop": ResetTimes(2.0, 0.5),
        "frozenlake": ResetTimes(0.5, 0.5),
        "math": ResetTimes(0.2, 0.5),
        "game": ResetTimes(0.2, 0.5),
    }
)

REWARD_MEAN_S: Mapping[str, float] = MappingProxyType(
    # A test suite; rules; a judge of 7B parameters that reads the solution and writes a verdict.
    {"swe": 30.0, "webshop": 0.1, "frozenlake": 0.1, "math": 6.0, "game": 0.1}
)
REWARD_LOG_SD = 0.6

SAME_REWARD_SHARE = 0.64
"""Measured live, trainings of the shipped agent on ``math``: 61 % of the sampled tokens (docs/training.md); 66 % in
another run, which is not kept.
"""


@dataclass(frozen=True, slots=True)
class TaskMix:
    """Groups of tasks that are drawn with equal chances.

    Attributes
    ----------
    members
        Trajectories of a group, redundant ones included.
    async_rewards
        Whether a trajectory calls its reward itself.
    tool_s, tool_sd_s
        If above 0, every turn's environment takes normally distributed seconds instead (RollArt, Figure 11b), at least
        0.01.
    same_reward_share
        Share of the groups whose members all have the same reward, whatever their task and length: the sample buffer
        refuses them. None of the paper's text says what its tasks have, nor whether it drops such groups: 0 is an
        assumption. Live, training the shipped agent on ``math``, see `SAME_REWARD_SHARE`.
    reset_tail_share, reset_limit_s
        Replace those of `RESETS`, where given.
    """

    seed: int
    tasks: tuple[str, ...] = tuple(TASKS)
    members: int = 8
    async_rewards: bool = True
    tool_s: float = 0.0
    tool_sd_s: float = 0.0
    same_reward_share: float = 0.0
    reset_tail_share: float | None = None
    reset_limit_s: float | None = None
    reset_failure_share: float = 0.0
    reset_mean_s: float | None = None
    context_tokens: int = CONTEXT_TOKENS

    def has_spread(self, group_id: str) -> bool:
        """Whether the members of a group have different rewards."""
        return random.Random(f"spread {self.seed} {group_id}").random() >= self.same_reward_share

    def group(self, task: int, attempt: int) -> list[PlannedTrajectory]:
        """The members of a group; another attempt at the same prompt draws other members."""
        name = self.tasks[random.Random(f"task {self.seed} {task}").randrange(len(self.tasks))]
        drawn = synthesize(
            TASKS[name],
            prompts=1,
            samples=self.members * (attempt + 1),
            seed=self.seed * 1_000_003 + task,
            max_output_tokens=self.context_tokens - 1_000,
        )[self.members * attempt :]
        group_id = f"{name}-{task}-{attempt}"
        return [self._member(plan, group_id, index) for index, plan in enumerate(drawn)]

    def _member(self, drawn: PlannedTrajectory, group_id: str, index: int) -> PlannedTrajectory:
        plan = fit_into_context(
            replace(drawn, prompt_tokens=min(drawn.prompt_tokens, self.context_tokens // 4)),
            token_scale=1.0,
            tool_scale=1.0,
            max_context_tokens=self.context_tokens,
        )
        name = f"{group_id}-{index}"
        steps = plan.steps
        if self.tool_s:
            rng = random.Random(f"turns {self.seed} {name}")
            steps = tuple(
                replace(step, tool_s=max(0.01, rng.gauss(self.tool_s, self.tool_sd_s)))
                if step.tool is not None
                else step
                for step in steps
            )
        rewards = (self.reward(plan.domain, name),) if self.async_rewards else ()
        return replace(plan, trajectory_id=name, group_id=group_id, sample_index=index, steps=steps, rewards=rewards)

    def reward(self, domain: str, trajectory_id: str) -> PlannedAction:
        """The reward call of a trajectory on an elastic backend, which never makes it wait."""
        seconds = self.reward_s(domain, trajectory_id)
        return PlannedAction("reward", DurationProfile(seconds), ResourceDemand.of(cpus=0), kind="reward")

    def reward_s(self, domain: str, trajectory_id: str) -> float:
        """Seconds of its reward."""
        rng = random.Random(f"reward {self.seed} {trajectory_id}")
        return REWARD_MEAN_S[domain] * rng.lognormvariate(-(REWARD_LOG_SD**2) / 2, REWARD_LOG_SD)

    def reset_s(self, plan: PlannedTrajectory) -> float:
        """Seconds until its environment is ready."""
        resets = RESETS[plan.domain]
        changes: dict[str, float] = {"failure_share": self.reset_failure_share, "seed": self.seed}
        if self.reset_tail_share is not None:
            changes["tail_share"] = self.reset_tail_share
        if self.reset_limit_s is not None:
            changes["limit_s"] = self.reset_limit_s
        if self.reset_mean_s is not None:
            changes["mean_s"] = self.reset_mean_s
        return replace(resets, **changes).seconds(plan.trajectory_id)  # type: ignore[arg-type]
