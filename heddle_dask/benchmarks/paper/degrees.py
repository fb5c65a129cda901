"""What the resource manager is told before a rollout, and the degrees that it chooses.

A predictor gives median and 0.9 quantile of every trajectory. A single figure each would hide the tail, for which large
degrees are there: before the first step a learned predictor knows little but the prompt, so that its medians are nearly
alike. So each trajectory gets a quantile of its own of the log-normal through these two, the quantiles evenly spread
over trajectories and groups. An exact prediction has one value, and gets that.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import engine_cost_for
from heddle_dask.cost.hardware import ModelShape
from heddle_dask.cost.published import model_of
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.from_steps import finished_from_steps, known_work, past_of
from heddle_dask.sim.clusters import SLOTS_PER_GPU, Cluster
from heddle_dask.strategies.partition.work import Work
from heddle_dask.strategies.partition.work_plan import WorkEngine
from heddle_dask.strategies.presets import build_strategies, is_exact
from heddle_dask.strategies.tp_degrees.choice import choose_degrees
from heddle_dask.strategies.tp_degrees.degrees import Budget, DegreeChoice, allowed_degrees
from heddle_dask.strategies.tp_degrees.forecast import Guess, level_of
from heddle_dask.workloads.planned import PlannedTrajectory


def degrees_that_fit(shape: ModelShape, cluster: Cluster, max_context_tokens: int) -> tuple[int, ...]:
    """Degrees at which the model runs with this context, from the least.

    Raises
    ------
    BadInput
        There is none.
    """
    found = []
    for degree in sorted(allowed_degrees(shape.heads, cluster.gpus_per_node)):
        try:
            cost = engine_cost_for(shape, cluster.gpu, degree)
        except BadInput:  # weights alone do not fit
            continue
        if degree <= cluster.gpus and cost.capacity_tokens >= max_context_tokens + cost.block_tokens:
            found.append(degree)
    if not found:
        raise BadInput(f"the model fits no engine with a context of {max_context_tokens} tokens: shorten it")
    return tuple(found)


def predicted_works(
    plans: Sequence[PlannedTrajectory],
    predictor: Predictor,
    earlier: Sequence[PlannedTrajectory],
    max_context_tokens: int,
) -> list[Work]:
    """What each trajectory is thought to ask for before its first step.

    Parameters
    ----------
    predictor
        Has learnt from `earlier`, if it learns.
    earlier
        Say how much tools add, in tokens and seconds, for each sampled token.
    """
    sampled = sum(plan.generated_tokens for plan in earlier)
    observed = sum(plan.context_tokens - plan.prompt_tokens for plan in earlier) - sampled
    added_per_token = observed / sampled
    tool_s_per_token = sum(plan.tools_s for plan in earlier) / sampled
    starts = [finished_from_steps(past_of(plan)).points[0] for plan in plans]
    works = []
    for number, (plan, made) in enumerate(zip(plans, predictor.predict(starts), strict=True)):
        guess = Guess(made.tokens, made.tokens_q90)
        tokens = min(guess.quantile_tokens(level_of(number)), float(max_context_tokens - plan.prompt_tokens))
        added = min(added_per_token * tokens, max_context_tokens - plan.prompt_tokens - tokens)
        works.append(
            Work(
                group=plan.group_id,
                decode_tokens=tokens,
                context_tokens=plan.prompt_tokens + added / 2,
                shared_tokens=plan.prompt_tokens,
                prefill_tokens=added,
                tool_s=tool_s_per_token * tokens,
            )
        )
    return works


def degrees_by_predictions(
    preset: str,
    overrides: Sequence[str],
    plans: Sequence[PlannedTrajectory],
    earlier: Sequence[PlannedTrajectory],
    model: str,
    cluster: Cluster,
    max_context_tokens: int,
    *,
    seed: int,
) -> DegreeChoice:
    """`chosen_degrees` for what the predictor of a strategy says of `plans`, once it has learnt from `earlier`.

    Raises
    ------
    BadInput
        As `chosen_degrees`; or there is no such preset or part.
    """
    choice = build_strategies(preset, seed=seed, overrides=overrides).predictor
    assert choice is not None, preset
    predictor = build_predictor(choice, known_work(plans))
    predictor.warm_start(finished_from_steps(past_of(plan)) for plan in earlier)
    works = predicted_works(plans, predictor, earlier, max_context_tokens)
    return chosen_degrees(
        works, model_of(model), cluster, max_context_tokens, seed=seed, told_apart=is_exact(choice)
    )


def chosen_degrees(
    works: Sequence[Work],
    shape: ModelShape,
    cluster: Cluster,
    max_context_tokens: int,
    *,
    seed: int,
    told_apart: bool = True,
) -> DegreeChoice:
    """The resource manager's choice among all mixes (`choose_degrees`); starting engines costs nothing.

    Raises
    ------
    BadInput
        The model fits no engine.
    """
    degrees = degrees_that_fit(shape, cluster, max_context_tokens)
    engines = {
        degree: WorkEngine(
            engine_cost_for(shape, cluster.gpu, degree), cluster.slots or SLOTS_PER_GPU * degree
        )
        for degree in degrees
    }
    budget = Budget(cluster.gpus, cluster.gpus_per_node, degrees)
    return choose_degrees(works, budget, engines, seed=seed, told_apart=told_apart)
