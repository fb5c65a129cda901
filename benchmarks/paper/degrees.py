"""The TP degrees that are planned before a rollout of the paper's cells, by the predictions of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import TpDegreePlan
from heddle_dask.cost.hardware import ModelShape
from heddle_dask.cost.published import model_of
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.from_steps import finished_from_steps, known_work, past_of
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.deployment import plan_fleet, uniform_fleets
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.strategies.partition.work import Work
from heddle_dask.strategies.presets import build_strategies, is_exact
from heddle_dask.strategies.tp_degrees.forecast import Quantiles, level_of
from heddle_dask.workloads.planned import PlannedTrajectory


@dataclass(frozen=True, slots=True)
class PerToken:
    """Observation tokens and tool seconds per sampled token, over many earlier trajectories."""

    observation_tokens: float
    tool_s: float

    def work(self, number: int, group: str, prompt_tokens: int, made: Quantiles, max_context_tokens: int) -> Work:
        """The work of trajectory `number` of a batch from its prediction, at its quantile level."""
        tokens = min(made.tokens(level_of(number)), float(max_context_tokens - prompt_tokens))
        added = min(self.observation_tokens * tokens, max_context_tokens - prompt_tokens - tokens)
        return Work(
            group=group,
            decode_tokens=tokens,
            context_tokens=prompt_tokens + added / 2,
            shared_tokens=prompt_tokens,
            prefill_tokens=added,
            tool_s=self.tool_s * tokens,
        )


def fleets_that_fit(shape: ModelShape, cluster: Cluster, max_context_tokens: int) -> dict[int, SimulatedFleet]:
    """The fleets of one TP degree at which the model runs with this context, by TP degree from the smallest.

    Raises
    ------
    BadInput
        There is none.
    """
    fleets, _ = uniform_fleets(cluster, shape, max_context_tokens)
    if not fleets:
        raise BadInput(f"the model fits no engine with a context of {max_context_tokens} tokens: shorten it")
    return dict(sorted(fleets.items()))


def predicted_works(
    plans: Sequence[PlannedTrajectory],
    predictor: Predictor,
    earlier: Sequence[PlannedTrajectory],
    max_context_tokens: int,
) -> list[Work]:
    """The predicted work of each trajectory before its first step.

    Parameters
    ----------
    predictor
        The predictor; a learned one was fitted on `earlier`.
    earlier
        Earlier trajectories, for observation tokens and tool seconds per sampled token.
    """
    sampled = sum(plan.generated_tokens for plan in earlier)
    observed = sum(plan.context_tokens - plan.prompt_tokens for plan in earlier) - sampled
    added = PerToken(observed / sampled, sum(plan.tools_s for plan in earlier) / sampled)
    starts = [finished_from_steps(past_of(plan)).points[0] for plan in plans]
    return [
        added.work(
            number,
            plan.group_id,
            plan.prompt_tokens,
            Quantiles(made.tokens, made.tokens_q90),
            max_context_tokens,
        )
        for number, (plan, made) in enumerate(zip(plans, predictor.predict(starts), strict=True))
    ]


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
) -> TpDegreePlan:
    """The plan of TP degrees for the predicted work of `plans`; a learned predictor is fitted on `earlier` first.

    Raises
    ------
    BadInput
        The model fits no engine; or there is no such preset or part.
    """
    choice = build_strategies(preset, seed=seed, overrides=overrides).predictor
    assert choice is not None, preset
    predictor = build_predictor(choice, known_work(plans))
    predictor.warm_start(finished_from_steps(past_of(plan)) for plan in earlier)
    works = predicted_works(plans, predictor, earlier, max_context_tokens)
    fleets = fleets_that_fit(model_of(model), cluster, max_context_tokens)
    return plan_fleet(works, cluster, fleets, seed=seed, told_apart=is_exact(choice))
