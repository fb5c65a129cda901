"""Strategies by seeds: the trajectories that each seed draws, and the warm-start data of learned predictors.

A sweep is a list of jobs. A job describes one rollout completely and is picklable. Its result depends on the job
alone: any process may run it (`cli.sweep_runs`), alone or after others, with the same figures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.sim.bound import MakespanBound, makespan_bound
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import Arm, SimulatedRollout, check_fit, simulate
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.choice import load_workload
from heddle_dask.workloads.planned import PlannedTrajectory
from heddle_dask.workloads.recorded import RECORDED, trace_file
from heddle_dask.workloads.synthetic import WORKLOADS

WARM_TRAJECTORIES = 1600
_OTHER_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """A workload to draw for each seed; the fields are those of `workloads.choice.load_workload`.

    Attributes
    ----------
    digest
        Required SHA-256 of a trace file; empty: not checked.
    """

    name: str
    trajectories: int
    samples: int
    max_context_tokens: int
    token_scale: float = 1.0
    tool_scale: float = 1.0
    digest: str = ""

    def drawn(self, seed: int) -> list[PlannedTrajectory]:
        return self._load(self.trajectories, seed)

    def foreseen(self, seed: int) -> list[PlannedTrajectory]:
        """As many trajectories as in `drawn`, from another draw: the data known before the rollout.

        For a trace file they may include recorded groups of `drawn`.
        """
        return self._load(self.trajectories, seed + _OTHER_SEED)

    def others(self, seed: int) -> list[PlannedTrajectory]:
        """About `WARM_TRAJECTORIES` trajectories of groups that are not in `drawn` of this seed, with distinct names.

        From a trace file each group is taken once; the list is empty if no group remains.
        """
        if self.name in WORKLOADS:
            count = -(-WARM_TRAJECTORIES // self.samples) * self.samples
            found = self._load(count, seed + _OTHER_SEED)
        else:
            seen = {_recorded(plan.group_id) for plan in self.drawn(seed)}
            numbers: dict[str, str] = {}
            found = []
            for plan in self._load(4 * WARM_TRAJECTORIES, seed + _OTHER_SEED):
                group = _recorded(plan.group_id)
                # A group that is drawn twice gets another number each time: take the first only.
                if group not in seen and numbers.setdefault(group, plan.group_id) == plan.group_id:
                    found.append(plan)
            found = found[:WARM_TRAJECTORIES]
        return [
            replace(plan, trajectory_id=f"earlier {plan.trajectory_id}", group_id=f"earlier {plan.group_id}")
            for plan in found
        ]

    def warmth(self, seed: int) -> str:
        """A sentence saying which warm-start data predictors get for that seed."""
        if self.name in WORKLOADS or self.others(seed):
            return "warm"
        return "warm, but every group was drawn: nothing is left to learn from"

    def scales(self) -> dict[str, object]:
        """The scale factors of lengths and tools that are not 1."""
        factors = {"token scale": self.token_scale, "tool scale": self.tool_scale}
        return {name: factor for name, factor in factors.items() if factor != 1.0}

    def pinned(self) -> SimulatedWorkload:
        """The same workload for another process: a trace with its present digest, a file with its absolute path.

        A recorded trace keeps its name: every process reads the copy of its own installation.
        """
        if self.name in WORKLOADS:
            return self
        # Loading refuses a name that is no file, with the allowed names.
        path = Path(self.name)
        if self.name in RECORDED:
            return replace(self, digest=_digest(trace_file(self.name)))
        return replace(self, name=str(path.resolve()), digest=_digest(path)) if path.is_file() else self

    def _load(self, trajectories: int, seed: int) -> list[PlannedTrajectory]:
        if self.digest and (path := trace_file(self.name)).is_file() and _digest(path) != self.digest:
            raise BadInput(
                f"workload {self.name!r}: the file read here is not the one that the sweep was asked for: "
                "give all workers the same file"
            )
        return load_workload(
            self.name,
            trajectories=trajectories,
            samples=self.samples,
            seed=seed,
            token_scale=self.token_scale,
            tool_scale=self.tool_scale,
            max_context_tokens=self.max_context_tokens,
        )


@dataclass(frozen=True, slots=True)
class SimulationJob:
    """One rollout of a sweep.

    Attributes
    ----------
    warm
        Whether a learned predictor starts warm, from `SimulatedWorkload.others`.
    """

    workload: SimulatedWorkload
    fleet: SimulatedFleet
    arm: Arm
    seed: int
    warm: bool
    watched: bool = False


def parse_arms(text: str, overrides: Sequence[str] = ()) -> list[Arm]:
    """Parse strategies separated by commas, each ``preset:part=name,option=value:…``; `overrides` apply to all."""
    written: list[str] = []
    for piece in text.split(","):
        # A comma before option=value belongs to a part; a comma before a preset separates strategies.
        if written and "=" in piece.partition(":")[0]:
            written[-1] += f",{piece}"
        else:
            written.append(piece.strip())
    arms = [Arm.parse(one) for one in written if one]
    if not arms:
        raise BadInput("no strategy is named: give presets, separated by commas")
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f"strategy '{twice}' comes twice: name it once")
    arms = [Arm(arm.name, arm.preset, (*arm.overrides, *overrides)) for arm in arms]
    for arm in arms:
        build_strategies(arm.preset, overrides=arm.overrides)
    return arms


def sweep_jobs(
    workload: SimulatedWorkload,
    fleet: SimulatedFleet,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    *,
    warm: bool,
    watched_seed: int | None = None,
) -> list[SimulationJob]:
    """The jobs of all arms, seed by seed; the arms of a seed run the same trajectories.

    Parameters
    ----------
    watched_seed
        The seed for which rollouts keep their timelines.
    """
    return [
        SimulationJob(workload, fleet, arm, seed, warm, watched=seed == watched_seed) for seed in seeds for arm in arms
    ]


def run_jobs(jobs: Iterable[SimulationJob]) -> Iterator[SimulatedRollout]:
    """Run one job after the other, in order.

    Consecutive jobs of one workload and seed share the draw, so sort jobs by these.
    """
    draw: _Draw | None = None
    for job in jobs:
        if draw is None or (draw.workload, draw.seed) != (job.workload, job.seed):
            draw = _Draw(job.workload, job.seed)
        yield draw.run(job)


def run_job(job: SimulationJob) -> SimulatedRollout:
    return next(run_jobs([job]))


class _Draw:
    """The trajectories of a seed, with results that several jobs share (bound, warm-start data)."""

    def __init__(self, workload: SimulatedWorkload, seed: int) -> None:
        self.workload, self.seed = workload, seed
        self._plans = workload.drawn(seed)
        self._others: list[PlannedTrajectory] | None = None
        self._bounds: list[tuple[SimulatedFleet, MakespanBound]] = []

    def run(self, job: SimulationJob) -> SimulatedRollout:
        check_fit(self._plans, job.fleet)
        # Drawing them takes longer than some rollouts: do it for learned predictors only.
        warm = job.warm and _learns(job.arm)
        if warm and self._others is None:
            self._others = self.workload.others(self.seed)
        return simulate(
            job.arm.preset,
            job.arm.overrides,
            job.fleet,
            self._plans,
            seed=job.seed,
            warm=self._others if warm else None,
            name=job.arm.name,
            bound=self._bound(job.fleet),
            watched=job.watched,
        )

    def _bound(self, fleet: SimulatedFleet) -> MakespanBound:
        for known, bound in self._bounds:
            if known is fleet:
                return bound
        bound = makespan_bound(self._plans, fleet)
        self._bounds.append((fleet, bound))
        return bound


def _learns(arm: Arm) -> bool:
    choice = build_strategies(arm.preset, overrides=arm.overrides).predictor
    return choice is not None and choice.name != "oracle"


def _recorded(group_id: str) -> str:
    return group_id.rpartition("~")[0]


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInput(f"workload {str(path)!r}: {error.strerror}; give a file that can be read") from None
