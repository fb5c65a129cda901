"""Capacity planning: the fleets that a budget of GPUs can form for a model, and simulated rollouts on each.

Candidates of a budget are every uniform degree at which the model fits, with as many engines as fit, and the TP
degrees that `strategies.tp_degrees` plans. The plan uses the work of another draw than the simulated one, as a
prediction before the rollout would. Its estimate is reported beside the simulated makespan; only the latter decides.

TP degrees are the powers of two within a node, since the search needs degrees that divide one another.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.published import model_of
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.deployment import plan_fleet, uniform_fleets
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import Arm, SimulatedRollout
from heddle_dask.sim.sweep import SimulatedWorkload, SimulationJob
from heddle_dask.strategies.partition.work import Work
from heddle_dask.strategies.tp_degrees.degrees import SearchSettings
from heddle_dask.workloads.planned import PlannedTrajectory

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A fleet that a budget can form.

    Attributes
    ----------
    tp_degrees
        TP degrees of its engines, from the largest to the smallest.
    by_work_s
        Estimated makespan from the work model alone, seconds; infinite if some trajectory's context fits no engine.
    """

    tp_degrees: tuple[int, ...]
    fleet: SimulatedFleet
    searched: bool
    by_work_s: float

    @property
    def engines(self) -> str:
        return engines_in_words(self.tp_degrees)


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """The candidates for a number of GPUs.

    Attributes
    ----------
    candidates
        Uniform fleets from the largest degree to the smallest, then the result of the search if it is a mix.
    refused
        Why a uniform degree is infeasible, by degree.
    """

    gpus: int
    candidates: tuple[Candidate, ...]
    refused: Mapping[int, str]

    def uniform(self) -> GpuBudget:
        """Without mixes of TP degrees."""
        return replace(self, candidates=tuple(one for one in self.candidates if len(set(one.tp_degrees)) == 1))


@dataclass(frozen=True, slots=True)
class PlayedCandidate:
    """A candidate of a budget, and its simulated rollouts: one per seed, in the same order for all candidates."""

    gpus: int
    candidate: Candidate
    rollouts: tuple[SimulatedRollout, ...]

    @property
    def makespan_s(self) -> float:
        """Median over the seeds."""
        return statistics.median(one.makespan_s for one in self.rollouts)

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens over makespan, median over the seeds."""
        return statistics.median(one.tokens_per_s for one in self.rollouts)

    @property
    def steps_per_s(self) -> float:
        """LLM steps over makespan, median over the seeds."""
        return statistics.median(one.steps / one.makespan_s for one in self.rollouts)

    @property
    def completed(self) -> float:
        """Completed trajectories, median over the seeds; the walltime or faults cut off the others."""
        return statistics.median(one.completed for one in self.rollouts)

    @property
    def trajectories_per_h(self) -> float:
        """Completed trajectories per hour of the median makespan."""
        return self.completed / self.makespan_s * HOUR_S

    @property
    def gpu_hours_per_thousand(self) -> float:
        """GPU hours per thousand trajectories: all GPUs of the budget, idle ones too, for the whole makespan.

        Infinite if no trajectory completes.
        """
        return 1000 * self.gpus / self.trajectories_per_h if self.completed else math.inf

    @property
    def bound_share(self) -> float:
        """Lower bound for this fleet over makespan, median over the seeds."""
        return statistics.median(one.bound_share for one in self.rollouts)

    @property
    def path_share(self) -> float:
        """Longest trajectory alone on the fastest engine over makespan, median over the seeds.

        Near 1, more engines do not help.
        """
        return statistics.median(one.bound.path_s / one.makespan_s for one in self.rollouts)

    def figures(self, price_per_gpu_hour: float | None) -> dict[str, object]:
        """A JSON-able row; equal inputs give equal rows. Unknown values are null."""
        spans = [one.makespan_s for one in self.rollouts]
        hours = self.gpu_hours_per_thousand
        by_work_s = self.candidate.by_work_s
        return {
            "degrees": list(self.candidate.tp_degrees),
            "engines": len(self.candidate.tp_degrees),
            "searched": self.candidate.searched,
            "makespan_s": round(self.makespan_s, 3),
            "makespan_least_s": round(min(spans), 3),
            "makespan_most_s": round(max(spans), 3),
            "by_work_s": round(by_work_s, 3) if by_work_s < math.inf else None,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "steps_per_s": round(self.steps_per_s, 2),
            "trajectories_per_h": round(self.trajectories_per_h, 1),
            "completed": self.completed,
            "gpu_hours_per_thousand": round(hours, 4) if hours < math.inf else None,
            "price_per_thousand": None
            if price_per_gpu_hour is None or hours == math.inf
            else round(hours * price_per_gpu_hour, 4),
            "bound_share": round(self.bound_share, 4),
            "path_share": round(self.path_share, 4),
            "rows": [one.figures() for one in self.rollouts],
        }


def engines_in_words(degrees: Sequence[int]) -> str:
    """Engines counted by TP degree, the largest first."""
    return " + ".join(f"{degrees.count(d)} x TP{d}" for d in sorted(dict.fromkeys(degrees), reverse=True))


def works_of(trajectories: Iterable[PlannedTrajectory]) -> list[Work]:
    """The work of each trajectory on an engine with a cold cache.

    The context is the mean over the trajectory's life, so `Work.area` equals the tokens that its decoding reads.
    """
    works = []
    for one in trajectories:
        context, area, tokens, observed = one.prompt_tokens, 0.0, 0, 0
        for step in one.steps:
            area += step.generated_tokens * (context + step.generated_tokens / 2)
            tokens += step.generated_tokens
            observed += step.observation_tokens
            context += step.generated_tokens + step.observation_tokens
        works.append(
            Work(
                group=one.group_id,
                decode_tokens=float(tokens),
                context_tokens=max(0.0, area / tokens - tokens / 2),
                shared_tokens=float(one.prompt_tokens),
                # The observation after the last step is never prefilled.
                prefill_tokens=float(observed - one.steps[-1].observation_tokens),
                tool_s=one.tools_s,
            )
        )
    return works


def budget_of(
    cluster: Cluster,
    gpus: int,
    model: str,
    works: Sequence[Work],
    *,
    max_context_tokens: int,
    seed: int,
    told_apart: bool = True,
) -> GpuBudget:
    """The candidates for `gpus` GPUs of the kind in `cluster`, whose own number of GPUs and degrees are ignored.

    Parameters
    ----------
    told_apart
        Whether the strategies can tell long trajectories from short ones.

    Raises
    ------
    BadInput
        An unknown model or GPU, no GPU, or no work. Infeasible degrees are in `GpuBudget.refused` instead.
    """
    if gpus < 1:
        raise BadInput(f"a budget of {gpus} GPUs: give at least 1")
    if cluster.pools:
        raise BadInput("a cluster with pools of several classes is not planned: compare such with `heddle simulate`")
    shape = model_of(model)
    among = replace(cluster, gpus=gpus)
    fleets, refused = uniform_fleets(among, shape, max_context_tokens)
    if not fleets:
        return GpuBudget(gpus, (), refused)
    # Every mix is simulated, so the search need not demand a gain.
    eager = SearchSettings(mix_gain=0)
    plan = plan_fleet(works, among, fleets, seed=seed, told_apart=told_apart, settings=eager)
    candidates = [
        Candidate(degrees, fleet, searched=degrees == plan.tp_degrees, by_work_s=_or_inf(by_work_s))
        for (_, fleet), (_, by_work_s) in zip(fleets.items(), plan.uniform_s, strict=True)
        for degrees in [tuple(spec.tp_degree for spec, _ in fleet.engines)]
    ]
    if not any(one.searched for one in candidates):
        fleet = replace(among, tp=plan.tp_degrees).fleet(shape, max_context_tokens=max_context_tokens)
        by_work_s = _or_inf(plan.expected_makespan_s)
        candidates.append(Candidate(plan.tp_degrees, fleet, searched=True, by_work_s=by_work_s))
    return GpuBudget(gpus, tuple(candidates), refused)


def _or_inf(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def jobs_of(
    budgets: Sequence[GpuBudget], workload: SimulatedWorkload, arm: Arm, seeds: Sequence[int], *, warm: bool
) -> list[SimulationJob]:
    """Every candidate of every budget with every seed, seed by seed."""
    return [
        SimulationJob(workload, candidate.fleet, arm, seed, warm)
        for seed in seeds
        for budget in budgets
        for candidate in budget.candidates
    ]


def played_of(budgets: Sequence[GpuBudget], rollouts: Sequence[SimulatedRollout]) -> list[list[PlayedCandidate]]:
    """The candidates of each budget with their rollouts; `rollouts` are in the order of `jobs_of`."""
    places = [(budget, candidate) for budget in budgets for candidate in budget.candidates]
    played = iter(
        PlayedCandidate(budget.gpus, candidate, tuple(rollouts[place :: len(places)]))
        for place, (budget, candidate) in enumerate(places)
    )
    return [[next(played) for _ in budget.candidates] for budget in budgets]


def ranked(played: Iterable[PlayedCandidate]) -> list[PlayedCandidate]:
    """The candidates of one budget, best first: most completed, least median makespan, fewest engines."""
    return sorted(played, key=lambda one: (-one.completed, one.makespan_s, len(one.candidate.tp_degrees)))


def ratios_by_seed(one: PlayedCandidate, other: PlayedCandidate) -> list[float]:
    """Makespan of `other` over that of `one`, per seed: both ran the same trajectories."""
    return [b.makespan_s / a.makespan_s for a, b in zip(one.rollouts, other.rollouts, strict=True)]
