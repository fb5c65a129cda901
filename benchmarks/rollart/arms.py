"""The arms of ``python -m benchmarks rollart``: RollArt's baselines, its own rules, and ours."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import click

from benchmarks.experiments import Study
from benchmarks.rollart.rows import RollartRow
from benchmarks.rollart.training.rules import TrainingRules
from benchmarks.rollart.training_job import TP_DEGREES, StepFigures, TrainingJob, step_figures, tasks_of
from benchmarks.rollart.workload import TaskMix
from benchmarks.tables import ratio_fields
from heddle_dask.cli.train.command import train
from heddle_dask.core.run_description import StalenessMode
from heddle_dask.training.plan import SwitchOrder, plan_of_mode

TUNING_SEED = 901
"""The GPUs of every arm's trainer are chosen on this seed; others are reported."""

GROUPS = 8
"""An eighth of RollArt's batch of 512 trajectories, on an eighth of its 128 GPUs."""

GPUS = 16

TRAINER_GPUS = 6
"""Of the trainer where it is not tuned: near the best for most asynchronous arms with 8B on 16 GPUs."""

SHARES = (4, 6, 8, 12)
"""Numbers of the trainer's GPUs, of 16, of which every arm has its best; multiples of a model's TP degree only."""

REWARD_PLACES = 16
"""Rewards at a time in the reward stage of Sync."""


def base_job(model: str = "qwen3-8b", gpus: int = GPUS) -> TrainingJob:
    """An asynchronous run of one model on the paper's tasks."""
    rules = TrainingRules(groups=GROUPS * gpus // GPUS)
    degree = TP_DEGREES[model]
    trainer_gpus = gpus * TRAINER_GPUS // GPUS // degree * degree
    return TrainingJob(rules, TUNING_SEED, gpus, trainer_gpus, model, mix=TaskMix(0, tasks_of(model)))


def with_rules(job: TrainingJob, **changes: object) -> TrainingJob:
    """The job under changed rules."""
    return replace(job, rules=replace(job.rules, **changes))  # type: ignore[arg-type]


def colocated(job: TrainingJob, **changes: object) -> TrainingJob:
    """A synchronous run: trainer and engines take turns on all GPUs."""
    turns = replace(job, trainer_gpus=0, transfer="colocated")
    return with_rules(turns, mode="sync", **changes)


def sync(job: TrainingJob, cohort: int = 0) -> TrainingJob:
    """RollArt's Sync: environments in lockstep (all, or `cohort` at a time), rewards after the rollout."""
    turns = colocated(job)
    return replace(turns, lockstep=cohort or turns.rules.batch_trajectories, reward_places=REWARD_PLACES)


def shipped(job: TrainingJob) -> TrainingJob:
    """`heddle train` without an option of its loop: the plan, the bound and the updates of the command's defaults."""
    context = click.Context(train)
    default: dict[str, Any] = {option.name or "": option.get_default(context) for option in train.params}
    plan = plan_of_mode(default["mode"], 1, alpha=default["alpha"], depth=default["depth"], switch=default["switch"])
    return with_rules(
        job,
        mode=default["mode"],
        alpha=plan.alpha,
        depth=plan.depth,
        switch=plan.switch,
        staleness=default["staleness"],
        more_groups=default["extra_groups"],
        more_members=default["extra_samples"],
        keep_losers=default["late"] == "keep",
        keep_kv=default["keep_kv"],
        order=default["update_order"],
    )


def bounded(job: TrainingJob, alpha: int, depth: int, staleness: StalenessMode, switch: SwitchOrder) -> TrainingJob:
    """An asynchronous run of ours under this bound; the rest as shipped."""
    return with_rules(shipped(job), alpha=alpha, depth=depth, staleness=staleness, switch=switch)


OPPONENTS: Mapping[str, Callable[[TrainingJob], TrainingJob]] = MappingProxyType(
    {
        "Sync": sync,
        "Sync+": colocated,
        "One-off": lambda job: with_rules(job, mode="one-off"),
        "AReaL-like, 1": lambda job: with_rules(job, checks="start"),
        "RollArt's rules, 1 (n of the engines)": lambda job: with_rules(job, alpha=2, switch="after-batch"),
    }
)
"""RollArt's ladder. Engines take new weights all at once."""

OURS: Mapping[str, Callable[[TrainingJob], TrainingJob]] = MappingProxyType(
    {
        "alpha 1, cancel": lambda job: bounded(job, 1, 1, "cancel", "before-batch"),
        "alpha 1, cancel, after the batch": lambda job: bounded(job, 1, 1, "cancel", "after-batch"),
        "alpha 1, pace": lambda job: bounded(job, 1, 1, "pace", "before-batch"),
        "alpha 2, cancel": lambda job: bounded(job, 2, 2, "cancel", "before-batch"),
        "alpha 2, cancel, after the batch": lambda job: bounded(job, 2, 2, "cancel", "after-batch"),
        "alpha 2, pace": lambda job: bounded(job, 2, 2, "pace", "before-batch"),
        "alpha 3, cancel": lambda job: bounded(job, 3, 3, "cancel", "before-batch"),
        "alpha 3, pace": lambda job: bounded(job, 3, 3, "pace", "before-batch"),
    }
)
"""Choices of a user of `heddle train` with a bound of 1 to 3: depth alpha, switch before the batch unless said."""


def ladder(*chosen: str) -> Mapping[str, Callable[[TrainingJob], TrainingJob]]:
    """RollArt's ladder, the command's defaults, and these of `OURS`."""
    return {**OPPONENTS, "as shipped": shipped, **{name: OURS[name] for name in chosen}}


class TrainingBench:
    """Plays jobs on all seeds of a study but `TUNING_SEED`, and makes rows of them."""

    def __init__(self, study: Study) -> None:
        self.seeds = [seed for seed in study.seeds if seed != TUNING_SEED]
        self.study = study

    def figures(self, job: TrainingJob) -> list[StepFigures]:
        """The figures of each seed."""
        return self._played([job.seeded(seed) for seed in self.seeds])

    def _played(self, jobs: Sequence[TrainingJob]) -> list[StepFigures]:
        return self.study.runner.figures(StepFigures, step_figures, jobs, _told)

    def tuned(self, job: TrainingJob) -> TrainingJob:
        """The job with the number of the trainer's GPUs, of `SHARES`, that gives the shortest step."""
        if job.rules.mode == "sync":
            return job
        degree = TP_DEGREES[job.model]
        counts = {job.gpus * share // GPUS for share in SHARES if job.gpus * share // GPUS % degree == 0}
        jobs = [replace(job.seeded(TUNING_SEED), trainer_gpus=count) for count in sorted(counts)]
        figures = self._played(jobs)
        return min(zip(jobs, figures, strict=True), key=lambda pair: pair[1].step_s)[0]

    def rows(
        self,
        experiment: str,
        arms: Mapping[str, TrainingJob],
        over: str | Sequence[float],
        *,
        parameter: str = "",
        paper: Mapping[str, str] | None = None,
        seconds: Callable[[StepFigures], float] = lambda one: one.step_s,
        note: str = "",
    ) -> list[RollartRow]:
        """A row for each arm, with its ratio to the arm `over`, seed by seed.

        Parameters
        ----------
        over
            Name of the arm, or its seconds by seed.
        seconds
            What is compared.
        """
        self._played([job.seeded(seed) for seed in self.seeds for job in arms.values()])
        found = {name: self.figures(job) for name, job in arms.items()}
        reference = [seconds(one) for one in found[over]] if isinstance(over, str) else list(over)
        rows = []
        for name, figures in found.items():
            ratios = [other / seconds(one) for other, one in zip(reference, figures, strict=True)]
            row = training_row(experiment, name, parameter, arms[name], figures, seconds)
            more = ratio_fields(ratios if name != over else [])
            rows.append(replace(row, **more, paper_ratio=(paper or {}).get(name, ""), note=note))
        return rows


def training_row(
    experiment: str,
    arm: str,
    parameter: str,
    job: TrainingJob,
    figures: Sequence[StepFigures],
    seconds: Callable[[StepFigures], float],
) -> RollartRow:
    """The row of one arm over seeds, without a ratio."""
    ages: Counter[str] = Counter()
    wasted: Counter[str] = Counter()
    for one in figures:
        ages.update(one.ages)
        wasted.update(one.wasted_tokens)
    sampled = sum(one.sampled_tokens for one in figures) + wasted.total()
    return RollartRow(
        experiment,
        arm,
        parameter or job.model,
        _mean(map(seconds, figures)),
        _mean(one.tokens / one.step_s for one in figures),
        _mean(one.wait_share for one in figures),
        _mean(one.exposed_s for one in figures),
        {cause: tokens / sampled for cause, tokens in sorted(wasted.items())},
        {age: count / ages.total() for age, count in sorted(ages.items(), key=lambda pair: int(pair[0]))},
        _mean(one.sampled_length for one in figures),
        _mean(one.trained_length for one in figures),
        job.gpus,
        job.trainer_gpus,
        ", ".join(("training", "resets") if "swe" in job.mix.tasks else ("training",)),
        seeds=len(figures),
    )


def _told(job: TrainingJob, figures: StepFigures) -> str:
    engines = job.gpus - job.trainer_gpus
    return f"{job.model}, {job.rules.mode}, {engines} of {job.gpus} GPUs, seed {job.seed}: {figures.step_s:,.1f} s"


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
