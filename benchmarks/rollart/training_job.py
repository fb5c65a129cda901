"""One simulated training run of the benchmark: an arm on a cluster, with a workload and a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.rollart.training.rules import TrainingRules
from benchmarks.rollart.training.run import SimulatedTraining, TrainingFigures
from benchmarks.rollart.training.times import MODEL_FLOPS_SHARE, TrainingTimes, Transfer
from benchmarks.rollart.training.world import TrainingWorld
from benchmarks.rollart.workload import CONTEXT_TOKENS, SMALL_MODEL_TASKS, TASKS, TaskMix
from heddle_dask.cost.published import gpu_of, model_of
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.rollout import rollout_predictor
from heddle_dask.strategies.presets import build_strategies, tell_costs

TP_DEGREES = {"qwen3-8b": 1, "qwen3-14b": 2, "qwen3-32b": 4}
"""RollArt, section 7.1."""

_WARM_SEED = 500_000


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Everything that decides the figures of a run.

    Attributes
    ----------
    gpus, trainer_gpus
        All GPUs, and those of the trainer; 0: it takes turns with the engines on all of them.
    lockstep
        Environments that interact in lockstep, as a batch; 0: each by itself.
    reward_places
        Rewards at a time, of a reward stage after the rollout; 0: rewards are calls of the trajectories.
    strategy, overrides
        Of the rollout.
    warm, steps
        Training steps before the measurement, and in it.
    """

    rules: TrainingRules
    seed: int
    gpus: int = 32
    trainer_gpus: int = 8
    model: str = "qwen3-8b"
    gpu: str = "h800"
    transfer: Transfer = "store"
    lockstep: int = 0
    reward_places: int = 0
    strategy: str = "sticky-least-loaded"
    overrides: tuple[str, ...] = ()
    mix: TaskMix = field(default_factory=lambda: TaskMix(0))
    flops_share: float = MODEL_FLOPS_SHARE
    warm: int = 2
    steps: int = 4

    @property
    def times(self) -> TrainingTimes:
        """The trainer."""
        return TrainingTimes(
            model_of(self.model),
            gpu_of(self.gpu),
            self.trainer_gpus or self.gpus,
            TP_DEGREES[self.model],
            self.transfer,
            self.flops_share,
        )

    def seeded(self, seed: int) -> TrainingJob:
        """The same on another seed."""
        return replace(self, seed=seed)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a table needs of `TrainingFigures`, with the ages as texts."""

    step_s: float
    tokens: float
    rollout_s: float
    wait_share: float
    exposed_s: float
    ages: Mapping[str, int]
    wasted_tokens: Mapping[str, int]
    sampled_tokens: int
    sampled_length: float
    trained_length: float


def step_figures(job: TrainingJob) -> StepFigures:
    """Play a run."""
    found = run_training_job(job)
    return StepFigures(
        found.step_s,
        found.tokens,
        found.rollout_s,
        found.wait_share,
        found.exposed_s,
        {str(age): count for age, count in sorted(found.ages.items())},
        dict(found.wasted_tokens),
        found.sampled_tokens,
        found.sampled_length,
        found.trained_length,
    )


def tasks_of(model: str) -> tuple[str, ...]:
    """The tasks on which RollArt trains a model."""
    return tuple(TASKS) if model == "qwen3-32b" else SMALL_MODEL_TASKS


def run_training_job(job: TrainingJob) -> TrainingFigures:
    """Play a run; equal jobs give equal figures."""
    rules = job.rules
    mix = replace(
        job.mix,
        seed=job.seed,
        members=rules.members + rules.more_members,
        async_rewards=job.reward_places == 0,
    )
    cluster = Cluster(job.gpus - job.trainer_gpus, job.gpu, tp=TP_DEGREES[job.model])
    fleet = cluster.fleet(job.model, max_context_tokens=max(CONTEXT_TOKENS, mix.context_tokens))
    strategies = build_strategies(job.strategy, seed=job.seed, overrides=job.overrides)
    tell_costs(strategies, fleet.beliefs)
    earlier = [plan for task in range(24) for plan in replace(mix, seed=job.seed + _WARM_SEED).group(task, 0)]
    training = SimulatedTraining(
        rules, job.times, mix.group, has_spread=mix.has_spread, reward_s=_reward_stage_s(job, mix)
    )
    world = TrainingWorld(
        strategies,
        fleet,
        rules.run,
        job.times,
        training,
        predictor=rollout_predictor(strategies.predictor, earlier, earlier),
        seed=job.seed,
        reset_s=mix.reset_s,
        lockstep=job.lockstep,
    )
    return training.run(world, steps=job.steps, warm=job.warm)


def _reward_stage_s(job: TrainingJob, mix: TaskMix) -> float:
    """Seconds of the rewards of a batch, one after the other on `reward_places` places."""
    if not job.reward_places:
        return 0.0
    groups = [mix.group(task, 0) for task in range(job.rules.groups)]
    rewards = sorted((mix.reward_s(plan.domain, plan.trajectory_id) for each in groups for plan in each), reverse=True)
    places = [0.0] * job.reward_places
    for seconds in rewards:
        places[places.index(min(places))] += seconds
    return max(places)
