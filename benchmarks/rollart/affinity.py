"""Classes of hardware in simulation: pools of equal cost (RollArt, Figure 11a), and the duel of its section 2.4.

Rollout alone: trajectories of a mix of tasks, twice a batch of them alive at a time, as a bound of one version allows.
`step_s` is the time between the ends of batches while this many are alive. Training is not simulated here: where it
takes longer than the rollout, no pool makes a step shorter.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.experiments import Study
from benchmarks.opponents import LEAST_WORK
from benchmarks.rollart.rows import RollartRow
from benchmarks.rollart.workload import CONTEXT_TOKENS, TaskMix
from benchmarks.runner import LastFew
from benchmarks.tables import ratio_fields
from heddle_dask.sim.clusters import Cluster, HardwarePool
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import simulate
from heddle_dask.workloads.planned import PlannedTrajectory

TASKS = ("webshop", "frozenlake", "math", "game")
BATCH = 512
MEMBERS = 8
NO_PREFIX_TOKENS = 1 << 16
"""A KV block longer than any context: nothing of a context is found in the prefix cache, and every turn computes it."""

MAP = "affinity=map,math=H20,game=H20,default=H800"
PRICED = "affinity=priced"


def pools_of(h800: int, h20: int, tp: int = 1) -> Cluster:
    """A cluster of so many GPUs of both classes."""
    counted = (("H800", h800), ("H20", h20))
    pools = tuple(HardwarePool(name, gpus, name.lower(), tp) for name, gpus in counted if gpus)
    return Cluster(h800 + h20, pools=pools)


def without_prefixes(fleet: SimulatedFleet) -> SimulatedFleet:
    """The same engines with prefix caches that find nothing."""
    engines = ((spec, replace(cost, block_tokens=NO_PREFIX_TOKENS)) for spec, cost in fleet.engines)
    return replace(fleet, engines=tuple(engines))


@dataclass(frozen=True, slots=True)
class PoolJob:
    """One rollout on pools of two classes of GPUs.

    Attributes
    ----------
    batch
        Trajectories of a batch, of which twice as many are alive; 0: all are.
    groups
        Groups of tasks.
    prefixes
        Whether prefix caches keep what fits; otherwise every turn computes its whole history.
    whole
        Whether a transfer of KV brings whole contexts, and not only tokens that the target lacks.
    """

    h800: int
    h20: int
    tasks: tuple[str, ...]
    groups: int
    seed: int
    overrides: tuple[str, ...] = ()
    batch: int = 0
    prefixes: bool = True
    model: str = "qwen3-8b"
    tp: int = 1
    whole: bool = True

    @property
    def fleet(self) -> SimulatedFleet:
        """The engines."""
        fleet = pools_of(self.h800, self.h20, self.tp).fleet(self.model, max_context_tokens=CONTEXT_TOKENS)
        fleet = fleet if self.prefixes else without_prefixes(fleet)
        return fleet if self.whole else replace(fleet, link=replace(fleet.link, whole=False))


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Seconds of the rollout, and of a batch in its steady middle (0: it has none)."""

    makespan_s: float
    steady_s: float


def run_pool_job(job: PoolJob) -> PoolFigures:
    """Play the rollout."""
    alive = (f"admission=at-most,alive={2 * job.batch}",) if job.batch else ()
    trajectories = _planned(job.tasks, job.groups, job.seed)
    played = simulate("sticky-least-loaded", (*alive, *job.overrides), job.fleet, trajectories, seed=job.seed)
    return PoolFigures(played.makespan_s, _steady_s(played.completed_s, job.batch))


def planned(tasks: Sequence[str], groups: int, seed: int) -> list[PlannedTrajectory]:
    """Groups of these tasks, without rewards."""
    mix = TaskMix(seed=seed, tasks=tuple(tasks), members=MEMBERS, async_rewards=False)
    return [plan for number in range(groups) for plan in mix.group(number, 0)]


_planned = LastFew(planned)


def _steady_s(completed_s: Sequence[float], batch: int) -> float:
    """Seconds per batch between the end of the first one and that of the last but two: then fewer are alive."""
    ends, last = sorted(completed_s), len(completed_s) - 2 * batch
    if not 0 < batch < last:
        return 0.0
    return (ends[last - 1] - ends[batch - 1]) * batch / (last - batch)


def pool_figures(study: Study, arms: Mapping[str, PoolJob]) -> dict[str, list[PoolFigures]]:
    """The figures of each arm on each seed."""
    jobs = [replace(arm, seed=seed) for seed in study.seeds for arm in arms.values()]
    found = study.runner.figures(PoolFigures, run_pool_job, jobs, _told)
    return {name: found[number :: len(arms)] for number, name in enumerate(arms)}


def _told(job: PoolJob, figures: PoolFigures) -> str:
    return f"{job.h800} H800 and {job.h20} H20, {' '.join(job.overrides)}, seed {job.seed}: {figures.makespan_s:,.1f} s"


def mixed_pools(study: Study, *, scale: int = 4, batches: int = 6, model: str = "qwen3-8b") -> list[RollartRow]:
    """H800 and H20 at equal cost, without and with affinity (7.3, Figure 11a).

    Everything is divided by `scale`: GPUs and the batch of 512 trajectories. Each arm is played with prefix caches that
    keep what fits, and with ones that find nothing. `ratio` is the time of the H800 alone over that of this arm; the
    note says that over the H20.
    """
    batch = BATCH // scale
    mixed = PoolJob(64 // scale, 24 // scale, TASKS, batch * batches // MEMBERS, 0, batch=batch, model=model)
    cached = {
        "H20 only": replace(mixed, h800=0, h20=208 // scale),
        "H800 only": replace(mixed, h800=72 // scale, h20=0),
        "mixed, no affinity": mixed,
        "mixed, least work": replace(mixed, overrides=(f"placement={LEAST_WORK}",)),
        "mixed, map": replace(mixed, overrides=(MAP,)),
        "mixed, priced": replace(mixed, overrides=(PRICED,)),
    }
    rows = []
    for parameter, prefixes in (("prefixes found", True), ("prefixes lost", False)):
        arms = {name: replace(job, prefixes=prefixes) for name, job in cached.items()}
        found = pool_figures(study, arms)
        steps = {name: [one.steady_s for one in figures] for name, figures in found.items()}
        rows += [_mixed_row(arm, parameter, steps, scale) for arm in arms]
    return rows


def _mixed_row(arm: str, parameter: str, steps: Mapping[str, list[float]], scale: int) -> RollartRow:
    mine, h20, h800 = steps[arm], steps["H20 only"], steps["H800 only"]
    over_h20 = statistics.fmean(b / a for a, b in zip(mine, h20, strict=True))
    return RollartRow(
        "mixed pools at equal cost",
        arm,
        parameter,
        statistics.fmean(mine),
        **ratio_fields([b / a for a, b in zip(mine, h800, strict=True)]),
        paper_ratio="1.12 to 1.37 (H800), 1.30 to 1.68 (H20)" if arm.startswith("mixed") else "",
        seeds=len(mine),
        note=f"over H800 only; over H20 only {over_h20:.2f}; GPUs and batch divided by {scale}",
    )


def equal_cost_duel(
    study: Study, *, batches: Sequence[int] = (64, 128, 192), model: str = "qwen3-8b"
) -> list[RollartRow]:
    """Two H800 (5.7 units of cost) against six H20 (6.0) with one task (2.2); ratio: time of H20 over that of H800.

    `step_s` is the makespan of one batch: above 1, H800 are faster.
    """
    rows = []
    for task, paper in (("frozenlake", "up to 1.89"), ("math", "0.49 to 0.79")):
        for prefixes in (True, False):
            for batch in batches:
                h800 = PoolJob(2, 0, (task,), batch // MEMBERS, 0, batch=batch, prefixes=prefixes, model=model)
                found = pool_figures(study, {"h800": h800, "h20": replace(h800, h800=0, h20=6)})
                ratios = [
                    theirs.makespan_s / mine.makespan_s
                    for mine, theirs in zip(found["h800"], found["h20"], strict=True)
                ]
                rows.append(
                    RollartRow(
                        "equal-cost duel",
                        f"{task}: 2 H800 over 6 H20",
                        f"batch {batch}, prefixes {'found' if prefixes else 'lost'}",
                        statistics.fmean(one.makespan_s for one in found["h800"]),
                        **ratio_fields(ratios),
                        paper_ratio=paper,
                        seeds=len(ratios),
                        note="rollout alone; paper: H20 seconds over H800 seconds",
                    )
                )
    return rows
