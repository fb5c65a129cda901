"""Values of a plan by work: an engine, and the engine of each trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.cost.engine_cost import EngineCost


@dataclass(frozen=True, slots=True)
class WorkEngine:
    """An engine to plan for."""

    cost: EngineCost
    slots: int


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """`engine_of[i]` is the number of the engine that takes trajectory i; `seconds` the estimated makespan."""

    seconds: float
    engine_of: tuple[int, ...]
