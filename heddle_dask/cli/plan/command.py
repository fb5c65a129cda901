"""``heddle plan``: how many GPUs to ask for, and which engines to form from them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heddle_dask.cli.engine_option import strategies_from_here
from heddle_dask.cli.option_groups import simulated
from heddle_dask.cli.plan.split import SplitAnswer, SplitRequest, split_answer, split_json, split_lines
from heddle_dask.cli.shared_options import COUNT, NOT_NEGATIVE, print_json, shared_options, whole_numbers
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.gpu_split import Overlap

if TYPE_CHECKING:
    from heddle_dask.cli.plan.training import TrainAnswer, TrainRequest
    from heddle_dask.sim.clusters import Cluster
    from heddle_dask.sim.plan import GpuBudget, PlayedCandidate
    from heddle_dask.sim.rollout import Arm
    from heddle_dask.sim.sweep import SimulatedWorkload


@click.command("plan")
@simulated
@click.option("--cluster", default="hopper64", show_default=True, help="Kind of GPUs: name or FILE.toml.")
@click.option("--gpus", default=None, help="How many; several with commas [default: the cluster's].")
@click.option(
    "--strategy",
    default=None,
    callback=strategies_from_here,
    help="Preset[:part=name,option=value:…] [default: heddle; with --train sticky-forecast].",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    callback=strategies_from_here,
    help="PART=NAME[,KEY=VALUE]...: replace a part of it.",
)
@click.option(
    "--trajectories",
    type=COUNT,
    default=None,
    help="[default: 100 for each GPU of the largest budget, in whole groups; with --train some batches]",
)
@click.option(
    "--price-per-gpu-hour",
    type=NOT_NEGATIVE,
    default=None,
    help="Also print the cost in money.",
)
@click.option(
    "--trainer-s",
    default=None,
    help="Also split GPUs: seconds of a trainer step, 8=120,16=64 or 5+960/gpus (docs/affinity.md).",
)
@click.option("--total-gpus", type=COUNT, default=None, help="GPUs of trainer and rollout together.")
@click.option(
    "--overlap",
    type=click.Choice(["sync", "async"]),
    default="async",
    show_default=True,
    help="async: the trainer works while the rollout goes on.",
)
@click.option(
    "--batch", type=COUNT, default=None, help="Trajectories of a trainer step [default: all; with --train 64]."
)
@click.option("--update-s", type=NOT_NEGATIVE, default=0.0, show_default=True, help="Of a weight update.")
@click.option("--train", is_flag=True, help="Plan a training: --gpus are those of trainer and engines (docs/plan.md).")
@click.option("--lora", type=COUNT, default=None, help="With --train, as of `heddle train`.")
@click.option("--trainer", "trainer_set", multiple=True, help="KEY=VALUE: with --train, as of `heddle train`.")
@shared_options
def plan(
    workload: str,
    model: str,
    cluster: str,
    gpus: str | None,
    strategy: str | None,
    overrides: tuple[str, ...],
    seeds: int,
    trajectories: int | None,
    samples: int,
    slots: int | None,
    max_context_tokens: int,
    token_scale: float,
    tool_scale: float,
    warm: bool,
    price_per_gpu_hour: float | None,
    trainer_s: str | None,
    total_gpus: int | None,
    overlap: Overlap,
    batch: int | None,
    update_s: float,
    train: bool,
    lora: int | None,
    trainer_set: tuple[str, ...],
    scheduler: str | None,
    tables: tuple[str, ...],
    as_json: bool,
    seed: int,
) -> None:
    """Say which TP degrees suit a workload, a model and a number of GPUs, and what the rollout costs.

    Simulates every feasible uniform degree and the mix that the search picks.
    """
    from heddle_dask.sim.clusters import cluster_of, with_choices
    from heddle_dask.sim.plan import ranked
    from heddle_dask.sim.sweep import SimulatedWorkload

    arm = _one_arm(strategy or ("sticky-forecast" if train else "heddle"), overrides)
    request = None if train else SplitRequest.of(trainer_s, total_gpus, overlap, batch, update_s)
    described = with_choices(cluster_of(cluster), tp=None, slots=slots, tables=tables)
    given = [described.gpus] if gpus is None else whole_numbers("--gpus", gpus, "8 or 8,16,32")
    numbers = list(dict.fromkeys(given))
    training = None
    if train:
        told = {"lora": lora, "trainer_set": trainer_set, "batch": batch, "overlap": overlap, "total_gpus": total_gpus}
        training = _training(model, numbers, described, max_context_tokens, told)
        numbers = training.plan.rollout_gpus(training.plan.fitting())
        described = replace(described, memory_share=training.plan.engine_memory_share())
        trajectories = trajectories or training.simulated_trajectories(samples)
    elif lora or trainer_set:
        raise BadInput("--lora and --trainer are of --train: give it too")
    count = trajectories or max(samples, 100 * max(numbers) // samples * samples)
    work = SimulatedWorkload(workload, count, samples, max_context_tokens, token_scale, tool_scale)
    budgets = _feasible_budgets(described, numbers, model, work, arm, seed)
    if training is not None:
        budgets = [budget.uniform() for budget in budgets]
    played = _played(budgets, work, arm, range(seed, seed + seeds), warm=warm, scheduler=scheduler)
    conditions: dict[str, object] = {
        **{"workload": workload, "cluster": cluster, "gpu": described.gpu, "model": model, "strategy": arm.name},
        **{"trajectories": count, "samples": samples, "slots": described.slots or "100 per GPU"},
        "max_context_tokens": max_context_tokens,
        **{"predictor": work.warmth(seed) if warm else "cold", "seeds": seeds},
        **work.scales(),
        **described.conditions(),
    }
    best = [ranked(mine)[0] for mine in played if mine]
    trained = None if training is None else training.answer(best, work.drawn(seed), trainer_s, update_s)
    answer = None if trained is None else trained.split
    if request is not None:
        answer = split_answer(request, best, count, described.gpus_per_node)
    _report(conditions, budgets, played, price_per_gpu_hour, answer, trained, as_json=as_json)


def _training(
    model: str, gpus: Sequence[int], described: Cluster, max_context_tokens: int, told: Mapping[str, object]
) -> TrainRequest:
    # Imported here: it reads the options of another command.
    from heddle_dask.cli.plan.training import TrainRequest

    return TrainRequest.of(model, gpus, described, max_context_tokens, told)


def _played(
    budgets: Sequence[GpuBudget],
    work: SimulatedWorkload,
    arm: Arm,
    seeds: Sequence[int],
    *,
    warm: bool,
    scheduler: str | None,
) -> Sequence[Sequence[PlayedCandidate]]:
    """Simulate every candidate of every budget, on each seed."""
    from heddle_dask.cli.sweep_runs import play_jobs
    from heddle_dask.sim.plan import jobs_of, played_of

    names = [f"{budget.gpus} GPUs, {one.engines}" for _ in seeds for budget in budgets for one in budget.candidates]
    jobs = jobs_of(budgets, work, arm, seeds, warm=warm)
    return played_of(budgets, play_jobs(jobs, scheduler=scheduler, say=_say, names=names))


def _report(
    conditions: dict[str, object],
    budgets: Sequence[GpuBudget],
    played: Sequence[Sequence[PlayedCandidate]],
    price_per_gpu_hour: float | None,
    split: SplitAnswer | None,
    trained: TrainAnswer | None,
    *,
    as_json: bool,
) -> None:
    from heddle_dask.cli.plan.tables import plan_json, plan_lines

    lines = plan_lines(conditions, budgets, played, price_per_gpu_hour)
    told = plan_json(conditions, budgets, played, price_per_gpu_hour)
    if split is not None:
        lines += split_lines(split)
        told["split"] = split_json(split)
    if trained is not None:
        lines += trained.lines()
        told["training"] = trained.figures()
    for line in lines:
        click.echo(line, err=as_json)
    if as_json:
        print_json(told)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _one_arm(strategy: str, overrides: Sequence[str]) -> Arm:
    from heddle_dask.sim.sweep import parse_arms

    arms = parse_arms(strategy, overrides)
    if len(arms) > 1:
        raise BadInput(f"--strategy {strategy} names {len(arms)}: plan with one, compare with `heddle simulate`")
    return arms[0]


def _feasible_budgets(
    described: Cluster, numbers: Sequence[int], model: str, work: SimulatedWorkload, arm: Arm, seed: int
) -> list[GpuBudget]:
    """The engines that each number of GPUs can form; refuses if no number can form any."""
    from heddle_dask.sim.plan import budget_of, works_of
    from heddle_dask.strategies.presets import Strategy

    budget = functools.partial(
        budget_of,
        described,
        model=model,
        works=works_of(work.foreseen(seed)),
        max_context_tokens=work.max_context_tokens,
        seed=seed,
        told_apart=Strategy(arm.preset, arm.overrides).knows_lengths,
    )
    budgets = [budget(number) for number in numbers]
    _check_feasible(budgets, model, described.gpus_per_node)
    return budgets


def _shapes_allow(degree: int, model: str, gpus_per_node: int) -> bool:
    from heddle_dask.cost.hardware import check_degree
    from heddle_dask.cost.published import model_of

    try:
        check_degree(model_of(model), degree)
    except BadInput:
        return False
    return gpus_per_node % degree == 0


def _check_feasible(budgets: Sequence[GpuBudget], model: str, gpus_per_node: int) -> None:
    """Refuse if no budget has a candidate, with the reason of the most promising degree.

    That is the largest degree of the last budget that the shapes of model and node allow, if there is one.
    """
    if any(budget.candidates for budget in budgets):
        return
    last = budgets[-1]
    mine = [degree for degree in last.refused if degree <= last.gpus]
    degree = max([degree for degree in mine if _shapes_allow(degree, model, gpus_per_node)] or mine)
    name = Path(model).name or model
    raise BadInput(f"{name} fits no engine that {last.gpus} GPUs can form: {last.refused[degree]}")
