"""Engines on a cluster's GPUs: of one TP degree, of a planned mix of degrees, or planned during a rollout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import (
    DegreeRequest,
    EngineDescription,
    FinishedWork,
    NodeGpus,
    TpDegreePlan,
    TrajectorySpec,
)
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.cost.hardware import ModelShape
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.strategies.partition.work import Work, WorkEngine
from heddle_dask.strategies.tp_degrees.degrees import AvailableGpus, SearchSettings
from heddle_dask.strategies.tp_degrees.plan import plan_for_request, plan_for_works
from heddle_dask.workloads.planned import PlannedTrajectory


def uniform_fleets(
    cluster: Cluster, shape: ModelShape, max_context_tokens: int
) -> tuple[dict[int, SimulatedFleet], dict[int, str]]:
    """Feasible fleets of one TP degree each, and for the other degrees the reason why they are infeasible.

    Both by TP degree, from the largest to the smallest.
    """
    fleets: dict[int, SimulatedFleet] = {}
    refused: dict[int, str] = {}
    for degree in _powers_of_two(cluster.gpus_per_node):
        try:
            fleets[degree] = replace(cluster, tp=degree).fleet(shape, max_context_tokens=max_context_tokens)
        except BadInput as error:
            refused[degree] = str(error)
    return fleets, refused


def plan_fleet(
    works: Sequence[Work],
    cluster: Cluster,
    fleets: Mapping[int, SimulatedFleet],
    *,
    seed: int,
    told_apart: bool = True,
    settings: SearchSettings | None = None,
) -> TpDegreePlan:
    """Plan the TP degrees of the cluster's GPUs for this work, with engines as in `fleets`; starting them is free."""
    engines = engine_of_each(fleets)
    budget = AvailableGpus(cluster.gpus, cluster.gpus_per_node, tuple(engines))
    return plan_for_works(works, "given", budget, engines, seed=seed, told_apart=told_apart, settings=settings)


@dataclass(frozen=True, slots=True)
class SimulatedDeployment:
    """Engines planned by the rollout itself, as live with ``tp_degrees="auto"``.

    Searching and starting engines takes no virtual time.

    Attributes
    ----------
    asked
        TP degrees; empty: planned from the work of the `earlier` trajectories.
    told_apart
        Whether the strategies can tell long trajectories from short ones.
    """

    cluster: Cluster
    model: ModelShape
    max_context_tokens: int
    asked: tuple[int, ...] = ()
    earlier: tuple[PlannedTrajectory, ...] = ()
    seed: int = 0
    told_apart: bool = True

    def request(self, trajectories: Iterable[TrajectorySpec]) -> DegreeRequest:
        specs = tuple(trajectories)
        fleets, _ = uniform_fleets(self.cluster, self.model, self.max_context_tokens)
        return DegreeRequest(
            request_id=1,
            nodes=tuple(self._nodes()),
            asked=self.asked,
            candidates=tuple(fleets),
            default=min(fleets, default=1),
            trajectories=specs,
            known_tokens=(0,) * len(specs),
            finished=tuple(_finished(plan) for plan in self.earlier),
            max_context_tokens=self.max_context_tokens,
        )

    def plan(self, request: DegreeRequest) -> TpDegreePlan:
        fleets, _ = uniform_fleets(self.cluster, self.model, self.max_context_tokens)
        return plan_for_request(request, engine_of_each(fleets), seed=self.seed, told_apart=self.told_apart)

    def engines(self, tp_degrees: Sequence[int]) -> Sequence[tuple[EngineDescription, EngineCost]]:
        formed = replace(self.cluster, tp=tuple(tp_degrees))
        return formed.fleet(self.model, max_context_tokens=self.max_context_tokens).engines

    def _nodes(self) -> Iterable[NodeGpus]:
        """Nodes with a worker for each GPU; the last holds what is left over."""
        whole, rest = divmod(self.cluster.gpus, self.cluster.gpus_per_node)
        sizes = [self.cluster.gpus_per_node] * whole + [rest] * bool(rest)
        return (NodeGpus(size, size) for size in sizes)


def _finished(plan: PlannedTrajectory) -> FinishedWork:
    observed = sum(step.observation_tokens for step in plan.steps[:-1])
    return FinishedWork(plan.generated_tokens, observed, plan.tools_s)


def engine_of_each(fleets: Mapping[int, SimulatedFleet]) -> dict[int, WorkEngine]:
    """One engine of each uniform fleet, as the search takes it."""
    first = {tp_degree: fleet.engines[0] for tp_degree, fleet in fleets.items()}
    return {tp_degree: WorkEngine(cost, spec.slots) for tp_degree, (spec, cost) in first.items()}


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in reversed(range(most.bit_length()))]
