"""Plans of the TP degrees: from forecast or known work, through the search, to the degrees of the engines.

The live body plans for a `DegreeRequest` (`plan_for_request`), with forecasts; capacity planning and benchmarks plan
for known works (`plan_for_works`). Pure, and slow for many GPUs: run it outside the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import DegreeRequest, TpDegreePlan
from heddle_dask.strategies.partition.work import Work, WorkEngine
from heddle_dask.strategies.tp_degrees.assignment import budget_of
from heddle_dask.strategies.tp_degrees.choice import choose_degrees
from heddle_dask.strategies.tp_degrees.degrees import AvailableGpus, Running, SearchSettings
from heddle_dask.strategies.tp_degrees.forecast import Quantiles, forecast_works


def plan_for_request(
    request: DegreeRequest,
    engines: Mapping[int, WorkEngine],
    predicted: Sequence[Quantiles] = (),
    *,
    seed: int,
    told_apart: bool = True,
) -> TpDegreePlan:
    """Plan for a batch with the best available forecast; without a forecast, keep the running engines.

    Parameters
    ----------
    engines
        Cost and slots of one engine at every candidate TP degree.
    predicted
        Predictions for each trajectory of the batch; empty without predictions.
    seed, told_apart
        As in `choose_degrees`.

    Raises
    ------
    BadInput
        No engine runs, there is no forecast, and no node has the GPUs for one engine of the default TP degree. With a
        forecast: as `budget_of` and `choose_degrees`.
    """
    works, source = forecast_works(request, predicted)
    if not works:
        return _without_forecast(request)
    budget = budget_of(request.nodes, request.candidates)
    return plan_for_works(works, source, budget, engines, running=_running(request), seed=seed, told_apart=told_apart)


def plan_for_works(
    works: Sequence[Work],
    source: str,
    budget: AvailableGpus,
    engines: Mapping[int, WorkEngine],
    *,
    running: Running | None = None,
    seed: int,
    told_apart: bool = True,
    settings: SearchSettings | None = None,
) -> TpDegreePlan:
    """The result of `choose_degrees` for this work, as a plan.

    Raises
    ------
    BadInput
        As `choose_degrees`.
    """
    allowed = {tp_degree: engines[tp_degree] for tp_degree in budget.tp_degrees if tp_degree in engines}
    choice = choose_degrees(works, budget, allowed, running, seed=seed, settings=settings, told_apart=told_apart)
    return TpDegreePlan(
        tp_degrees=choice.tp_degrees,
        source=source,
        expected_makespan_s=choice.seconds,
        restart_s=choice.price_s,
        uniform_s=tuple(
            (tp_degree, seconds if seconds < math.inf else None) for tp_degree, seconds in choice.uniform.items()
        ),
    )


def _running(request: DegreeRequest) -> Running | None:
    """The running engines, with the price of a new engine: the longest measured start.

    For a TP degree that was never started, the slowest start of any degree is assumed.
    """
    if not request.running:
        return None
    start_s = dict(request.start_s)
    longest_s = max(start_s.values(), default=0.0)
    return Running(request.running, {d: start_s.get(d, longest_s) for d in request.candidates})


def _without_forecast(request: DegreeRequest) -> TpDegreePlan:
    """Keep the running engines; if none runs, the default TP degree on all GPUs."""
    degrees = sorted(request.running, reverse=True)
    default = request.default
    if not degrees:
        degrees = [default] * sum(min(node.gpus // default, node.workers) for node in request.nodes)
    if not degrees:
        raise BadInput(f"no node has {default} GPUs for an engine of TP degree {default}: start more workers")
    return TpDegreePlan(tuple(degrees), "nothing")
