"""Plans of TP degrees: budgets, forecasts, the fallback, and the price of a start."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.batch_builders import engines_of

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import GroupId, TrajectoryId
from heddle_dask.core.nouns import DegreeRequest, FinishedWork, NodeGpus, TpDegreePlan, TrajectorySpec
from heddle_dask.strategies.tp_degrees.assignment import budget_of
from heddle_dask.strategies.tp_degrees.choice import choose_degrees
from heddle_dask.strategies.tp_degrees.degrees import Running
from heddle_dask.strategies.tp_degrees.forecast import Quantiles, forecast_works, needs_prediction
from heddle_dask.strategies.tp_degrees.plan import plan_for_request


def batch(*known_tokens: int, prompt_tokens: int = 7, context: int = 4096) -> DegreeRequest:
    """A batch of one group on one node of four GPUs."""
    return DegreeRequest(
        request_id=1,
        nodes=(NodeGpus(4, 4),),
        candidates=(4, 2, 1),
        trajectories=tuple(
            TrajectorySpec(TrajectoryId(f"t{i}"), GroupId("g"), prompt_tokens=prompt_tokens)
            for i in range(len(known_tokens))
        ),
        known_tokens=known_tokens,
        max_context_tokens=context,
    )


def test_the_budget_holds_no_tp_degree_that_would_need_more_workers() -> None:
    assert budget_of([NodeGpus(4, 4)], [1, 2, 4]).tp_degrees == (4, 2, 1)
    assert budget_of([NodeGpus(4, 2)], [1, 2, 4]).tp_degrees == (4, 2)
    budget = budget_of([NodeGpus(4, 4), NodeGpus(4, 4), NodeGpus(1, 1)], [1, 2])
    assert (budget.gpus, budget.gpus_per_node) == (9, 4)
    with pytest.raises(BadInput, match="nodes of 4, 1, 1 GPUs"):
        budget_of([NodeGpus(4, 4), NodeGpus(1, 1), NodeGpus(1, 1)], [1])
    with pytest.raises(BadInput, match="start a worker for each GPU"):
        budget_of([NodeGpus(4, 1)], [1, 2])
    with pytest.raises(BadInput, match="no worker can host an engine"):
        budget_of([], [1])


def test_known_tokens_come_first_then_earlier_trajectories_then_the_predictor() -> None:
    past = (FinishedWork(10, 4, 0.5), FinishedWork(30, 4, 0.5), FinishedWork(20, 4, 0.5))
    works, source = forecast_works(replace(batch(50, 60), finished=past), [])
    assert ([work.decode_tokens for work in works], source) == ([50, 60], "known")
    works, source = forecast_works(replace(batch(*[0] * 6), finished=past), [Quantiles(1, 2)] * 6)
    assert source == "earlier trajectories"
    assert sorted(work.decode_tokens for work in works) == [10, 10, 20, 20, 30, 30]
    assert {(w.shared_tokens, w.prefill_tokens, w.context_tokens, w.tool_s) for w in works} == {(7, 4, 9, 0.5)}
    works, source = forecast_works(batch(*[0] * 101), [Quantiles(100, 400)] * 101)
    assert source == "predictor"
    lengths = sorted(work.decode_tokens for work in works)
    assert abs(lengths[50] - 100) <= 3 and abs(lengths[91] - 400) <= 40
    assert forecast_works(batch(0), []) == ([], "")


def test_a_predictor_is_asked_only_where_nothing_else_says_the_lengths() -> None:
    assert needs_prediction(batch(0, 5))
    assert not needs_prediction(batch(5, 5))
    assert not needs_prediction(replace(batch(0, 0), finished=(FinishedWork(3),)))


def test_no_forecast_is_longer_than_the_context() -> None:
    long = replace(batch(0, prompt_tokens=100, context=400), finished=(FinishedWork(900, 900),))
    (work,), _ = forecast_works(long, [])
    assert work.shared_tokens + work.decode_tokens + work.prefill_tokens <= 400


def test_without_a_forecast_what_runs_goes_on_and_at_first_the_default_on_all_gpus() -> None:
    unknown = replace(batch(0), default=2)
    engines = engines_of("qwen3-8b-h100")
    assert plan_for_request(unknown, engines, seed=0) == TpDegreePlan((2, 2), "nothing")
    few = replace(unknown, nodes=(NodeGpus(4, 1), NodeGpus(3, 3)))
    assert plan_for_request(few, engines, seed=0).tp_degrees == (2, 2)
    going = replace(unknown, running=(1, 3))
    assert plan_for_request(going, engines, seed=0) == TpDegreePlan((3, 1), "nothing")
    with pytest.raises(BadInput, match="no node has 8 GPUs for an engine of TP degree 8"):
        plan_for_request(replace(unknown, default=8), engines, seed=0)


def test_a_plan_is_the_choice_of_the_search_and_an_unmeasured_start_costs_as_much_as_the_slowest() -> None:
    request = replace(batch(900, 100, 100, 100), running=(1, 1, 1, 1), start_s=((1, 2.0), (2, 5.0)))
    engines = engines_of("qwen3-8b-h100")
    works, _ = forecast_works(request, [])
    running = Running((1, 1, 1, 1), {1: 2.0, 2: 5.0, 4: 5.0})
    budget = budget_of(request.nodes, request.candidates)
    choice = choose_degrees(works, budget, engines, running, seed=3)
    plan = plan_for_request(request, engines, seed=3)
    assert (plan.tp_degrees, plan.expected_makespan_s, plan.restart_s, plan.source) == (
        choice.tp_degrees,
        choice.seconds,
        choice.price_s,
        "known",
    )
    assert dict(plan.uniform_s) == dict(choice.uniform)
    dear = plan_for_request(replace(request, start_s=((1, 1e6),)), engines, seed=3)
    assert (dear.tp_degrees, dear.restart_s) == ((1, 1, 1, 1), 0.0), "nothing is worth a start"
