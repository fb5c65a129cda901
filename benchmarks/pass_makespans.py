"""``benchmarks passes --makespan``: what predictions are worth on the first and on a later pass over the prompts.

The later pass of a workload is rolled out by strategies with the predictors of `PREDICTORS`. The earlier pass over the
same prompts is the warm start of the learned ones: with the prompts unknown, which is a first pass; known; or known
from a policy that has moved on since (`predictor_passes`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

from benchmarks.paper.results import ratios
from benchmarks.paper.sweep import engines_text, stored_figures
from benchmarks.predictor_passes import deal_passes, drift_of
from benchmarks.row_file import Row
from benchmarks.runner import LastFew, Runner, SweepRun
from benchmarks.tables import markdown, names, spread
from heddle_dask.core.errors import BadInput
from heddle_dask.sim.bound import MakespanBound, makespan_bound
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.rollout import Arm, simulate
from heddle_dask.workloads.bootstrap import file_domain
from heddle_dask.workloads.planned import PlannedTrajectory, fit_into_context, is_replayable, planned_trace
from heddle_dask.workloads.recorded import trace_file
from heddle_dask.workloads.synthetic import WORKLOADS, synthesize
from heddle_dask.workloads.traces import read_traces

DRIFT = 1.3
PREDICTORS = ("none", "cold", "first-pass", "later-pass", "moved-on", "exact")
"""``cold``, ``first-pass``, ``later-pass``, ``moved-on``: the learned one, which knows nothing, other prompts, these
prompts, or these prompts from a policy whose lengths differ by a typical factor of `DRIFT`."""


@dataclass(frozen=True, slots=True)
class PassWorkload:
    """A workload with two passes.

    Attributes
    ----------
    trajectories, samples
        Of the later pass of a synthetic workload, and those of each prompt. A trace has all its repeated attempts.
    """

    name: str
    trajectories: int
    samples: int
    max_context_tokens: int
    token_scale: float = 1.0
    tool_scale: float = 1.0

    def passes(self, seed: int) -> tuple[list[PlannedTrajectory], list[PlannedTrajectory]]:
        """The earlier and the later pass of a seed; attempts at one prompt have one key.

        Raises
        ------
        BadInput
            There is no such trace, a prompt does not fit, or no prompt has two attempts.
        """
        attempts = list(self._synthetic(seed) if self.name in WORKLOADS else self._recorded())
        earlier, later = deal_passes(attempts, seed)
        if not later:
            raise BadInput(f"{self.name}: no prompt has two attempts, so there is no later pass")
        return [_of_earlier(one) for one in earlier], later

    def _synthetic(self, seed: int) -> Iterator[PlannedTrajectory]:
        prompts = max(1, self.trajectories // self.samples)
        for one in synthesize(self.name, prompts=prompts, samples=2 * self.samples, seed=seed):
            yield fit_into_context(
                replace(one, prompt_key=one.group_id),
                token_scale=self.token_scale,
                tool_scale=self.tool_scale,
                max_context_tokens=self.max_context_tokens,
            )

    def _recorded(self) -> Iterator[PlannedTrajectory]:
        path = trace_file(self.name)
        for trace in filter(is_replayable, read_traces(path)):
            plan = planned_trace(
                trace,
                domain=file_domain(path),
                token_scale=self.token_scale,
                tool_scale=self.tool_scale,
                max_context_tokens=self.max_context_tokens,
            )
            yield replace(plan, prompt_key=plan.group_id)


def _of_earlier(plan: PlannedTrajectory) -> PlannedTrajectory:
    """Under names of its own: ids and groups of another pass are others."""
    return replace(plan, trajectory_id=f"earlier {plan.trajectory_id}", group_id=f"earlier {plan.group_id}")


@dataclass(frozen=True, slots=True)
class PassPlace:
    """Where the passes run.

    Attributes
    ----------
    cluster_name, model
        As in rows.
    """

    cluster_name: str
    cluster: Cluster
    model: str


class _DrawnPasses:
    """The passes of one seed: drawn on demand, shared by all strategies."""

    def __init__(self, workload: PassWorkload, place: PassPlace, seed: int) -> None:
        self._workload, self._seed = workload, seed
        self._fleet = place.cluster.fleet(place.model, max_context_tokens=workload.max_context_tokens)

    @cached_property
    def _passes(self) -> tuple[list[PlannedTrajectory], list[PlannedTrajectory]]:
        return self._workload.passes(self._seed)

    @cached_property
    def _bound(self) -> MakespanBound:
        return makespan_bound(self._passes[1], self._fleet)

    def figures(self, arm: Arm, predictor: str) -> dict[str, Any]:
        """Roll the later pass out."""
        earlier, later = self._passes
        warm, choice = _predictor(predictor, earlier, self._seed)
        overrides = (*arm.overrides, f"predictor={choice}")
        rollout = simulate(arm.preset, overrides, self._fleet, later, seed=self._seed, warm=warm, bound=self._bound)
        return {**stored_figures(rollout), "rolled_out": rollout.trajectories}


_drawn = LastFew(_DrawnPasses)


def makespan_run(workload: PassWorkload, place: PassPlace, seed: int, arm: Arm, predictor: str) -> SweepRun:
    """A rollout of the later pass."""
    options = asdict(workload)
    key = {
        "kind": "pass",
        "model": place.model,
        "workload": options.pop("name"),
        "seed": seed,
        "cluster": place.cluster_name,
        "engines": engines_text(place.cluster.tp_degrees),
        **options,
        "arm": arm.name,
        "predictor": predictor,
    }
    return SweepRun(key, partial(_rolled_out, workload, place, seed, arm, predictor))


def _rolled_out(workload: PassWorkload, place: PassPlace, seed: int, arm: Arm, predictor: str) -> Row:
    return _drawn(workload, place, seed).figures(arm, predictor)


def measure_makespans(
    workload: PassWorkload,
    place: PassPlace,
    seeds: Sequence[int],
    strategies: Sequence[Arm],
    predictors: Sequence[str],
    runner: Runner,
) -> list[Row]:
    """The rows of every strategy, predictor and seed."""
    return runner.played(
        (
            makespan_run(workload, place, seed, arm, predictor)
            for seed in seeds
            for arm in strategies
            for predictor in predictors
        ),
        lambda row: (
            f"{row['workload']}, seed {row['seed']}, {row['arm']}, {row['predictor']}: {row['makespan_s']:,.1f} s"
        ),
    )


def predictors_named(text: str) -> list[str]:
    """Names of `PREDICTORS`, separated by commas, or ``all``.

    Raises
    ------
    BadInput
        A name is unknown, or there is none.
    """
    found = names(text)
    unknown = [name for name in found if name not in (*PREDICTORS, "all")]
    if unknown or not found:
        raise BadInput(f"--predictors {text}: use all, or some of {', '.join(PREDICTORS)}, separated by commas")
    return list(PREDICTORS) if "all" in found else list(dict.fromkeys(found))


def makespan_tables(rows: Sequence[Row]) -> Iterator[str]:
    """A Markdown table: every strategy and predictor, and the first of them over it on the same seeds."""
    heads = (
        "workload",
        "strategy",
        "predictor",
        "makespan s, median (least-most)",
        "of bound",
        "first row over it",
    )
    yield from markdown(heads, _makespan_lines(rows))


def _makespan_lines(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    lines: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["workload"], row["arm"], row["predictor"]), []).append(row)
    first: dict[str, list[Row]] = {}
    for (workload, arm, predictor), made in lines.items():
        seconds = [row["makespan_s"] for row in made]
        gains = ratios(first.setdefault(workload, made), made)
        share = statistics.median(row["bound_share"] for row in made)
        yield workload, f"`{arm}`", predictor, spread(seconds, 0), f"{share:.0%}", spread(gains)


def _predictor(
    name: str, earlier: Sequence[PlannedTrajectory], seed: int
) -> tuple[Sequence[PlannedTrajectory] | None, str]:
    """The warm start of a predictor, and its choice."""
    match name:
        case "none":
            return None, "none"
        case "cold":
            return None, "xgboost"
        case "exact":
            return None, "oracle"
        case "first-pass":
            # Without a key, the group stands for the prompt: that of the earlier pass is another one.
            return [replace(one, prompt_key="") for one in earlier], "xgboost"
        case "later-pass":
            return earlier, "xgboost"
    return [_moved_on(one, seed) for one in earlier], "xgboost"


def _moved_on(plan: PlannedTrajectory, seed: int) -> PlannedTrajectory:
    scale = drift_of(plan.prompt_key, DRIFT, seed)
    steps = [replace(step, generated_tokens=max(1, round(step.generated_tokens * scale))) for step in plan.steps]
    return replace(plan, steps=tuple(steps))
