"""``heddle bench passes --makespan``: what the history of prompts is worth in a simulated rollout of a later pass.

The later pass of a workload is rolled out by one preset with the predictors of `ARMS`. The earlier pass over the same
prompts is the warm start of the learned ones: with the prompts unknown, known, or known from a policy that has moved on
since (`predictor_passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from heddle_dask.benchmarks.predictor_passes import deal_passes, drift_of
from heddle_dask.sim.bound import makespan_bound
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import SimulatedRollout, simulate
from heddle_dask.workloads.bootstrap import file_domain
from heddle_dask.workloads.planned import PlannedTrajectory, fit_into_context, is_replayable, planned_trace
from heddle_dask.workloads.recorded import trace_file
from heddle_dask.workloads.synthetic import WORKLOADS, synthesize
from heddle_dask.workloads.traces import read_traces

DRIFT = 1.3
ARMS = ("no predictor", "no history", "history", f"moved on by {DRIFT:g}", "exact")


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
            There is no such trace, or a prompt does not fit.
        """
        attempts = list(self._synthetic(seed) if self.name in WORKLOADS else self._recorded())
        earlier, later = deal_passes(attempts, seed)
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


def measure_makespans(
    workload: PassWorkload,
    fleet: SimulatedFleet,
    seeds: Sequence[int],
    *,
    preset: str = "heddle",
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[SimulatedRollout]:
    """One rollout of the later pass for each seed and arm; the strategy of a row is the name of its arm."""
    made = []
    for seed in seeds:
        earlier, later = workload.passes(seed)
        bound = makespan_bound(later, fleet)
        for arm in ARMS:
            on_progress(f"{workload.name}, seed {seed}: {arm}")
            warm, predictor = _arm(arm, earlier, seed)
            made.append(
                simulate(preset, (predictor,), fleet, later, seed=seed, warm=warm, name=arm, bound=bound)
            )
    return made


def _arm(
    arm: str, earlier: Sequence[PlannedTrajectory], seed: int
) -> tuple[Sequence[PlannedTrajectory] | None, str]:
    match arm:
        case "no predictor":
            return None, "predictor=none"
        case "exact":
            return None, "predictor=oracle"
        case "no history":
            # Without a key, the group stands for the prompt: that of the earlier pass is another one.
            return [replace(one, prompt_key="") for one in earlier], "predictor=xgboost"
        case "history":
            return earlier, "predictor=xgboost"
    return [_moved_on(one, seed) for one in earlier], "predictor=xgboost"


def _moved_on(plan: PlannedTrajectory, seed: int) -> PlannedTrajectory:
    scale = drift_of(plan.prompt_key, DRIFT, seed)
    steps = [
        replace(step, generated_tokens=max(1, round(step.generated_tokens * scale))) for step in plan.steps
    ]
    return replace(plan, steps=tuple(steps))
