"""Classes of hardware in simulation: pools of equal cost (RollArt, Figure 11a), and the duel of its section 2.4.

Rollout alone: trajectories of a mix of tasks, twice a batch of them alive at a time, as a bound of one version allows.
`step_s` is the time between the ends of batches while this many are alive. Training is not simulated here: where it
takes longer than the rollout, no pool makes a step shorter.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.rollart.rows import RollartRow
from benchmarks.rollart.workload import CONTEXT_TOKENS, TaskMix
from heddle_dask.sim.clusters import Cluster, HardwarePool
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import SimulatedRollout, simulate
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
class RolloutArm:
    """A fleet and the overrides of its strategy."""

    name: str
    fleet: SimulatedFleet
    overrides: tuple[str, ...] = ()
    preset: str = "sticky-least-loaded"


def planned(tasks: Sequence[str], groups: int, seed: int) -> list[PlannedTrajectory]:
    """Groups of these tasks, without rewards."""
    mix = TaskMix(seed=seed, tasks=tuple(tasks), members=MEMBERS, async_rewards=False)
    return [plan for number in range(groups) for plan in mix.group(number, 0)]


def steady_step_s(played: SimulatedRollout, batch: int) -> float:
    """Seconds per batch between the end of the first one and that of the last but two: then fewer are alive."""
    ends = sorted(played.completed_s)
    last = len(ends) - 2 * batch
    return (ends[last - 1] - ends[batch - 1]) * batch / (last - batch)


def play(
    arm: RolloutArm, trajectories: Sequence[PlannedTrajectory], batch: int, seed: int
) -> SimulatedRollout:
    """All trajectories, twice a batch of them alive."""
    overrides = (f"admission=at-most,alive={2 * batch}", *arm.overrides)
    return simulate(arm.preset, overrides, arm.fleet, trajectories, seed=seed, name=arm.name)


def mixed_pools(
    seeds: Iterable[int] = (1, 2), *, scale: int = 4, batches: int = 6, model: str = "qwen3-8b"
) -> list[RollartRow]:
    """Pools of equal cost; everything is divided by `scale`: GPUs and the batch of 512 trajectories.

    Each arm is played with prefix caches that keep what fits, and with ones that find nothing: then every turn computes
    its whole history. `ratio` is the time of the H800 alone over that of this arm; the note says that over the H20.
    """
    cached = [
        RolloutArm("H20 only", _fleet(0, 208, scale, model)),
        RolloutArm("H800 only", _fleet(72, 0, scale, model)),
        RolloutArm("mixed, no affinity", _fleet(64, 24, scale, model)),
        RolloutArm("mixed, least work", _fleet(64, 24, scale, model), ("placement=least-work",)),
        RolloutArm("mixed, map", _fleet(64, 24, scale, model), (MAP,)),
        RolloutArm("mixed, priced", _fleet(64, 24, scale, model), (PRICED,)),
    ]
    rows = []
    for parameter, arms in (
        ("prefixes found", cached),
        ("prefixes lost", [replace(arm, fleet=without_prefixes(arm.fleet)) for arm in cached]),
    ):
        steps = _steps(arms, seeds, BATCH // scale, batches)
        rows += [_mixed_row(arm.name, parameter, steps, scale) for arm in arms]
    return rows


def _fleet(h800: int, h20: int, scale: int, model: str) -> SimulatedFleet:
    return pools_of(h800 // scale, h20 // scale).fleet(model, max_context_tokens=CONTEXT_TOKENS)


def _steps(
    arms: Sequence[RolloutArm], seeds: Iterable[int], batch: int, batches: int
) -> dict[str, list[float]]:
    steps: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for seed in seeds:
        trajectories = planned(TASKS, batch * batches // MEMBERS, seed)
        for arm in arms:
            steps[arm.name].append(steady_step_s(play(arm, trajectories, batch, seed), batch))
    return steps


def _mixed_row(arm: str, parameter: str, steps: dict[str, list[float]], scale: int) -> RollartRow:
    mine, h20, h800 = steps[arm], steps["H20 only"], steps["H800 only"]
    over_h800 = [b / a for a, b in zip(mine, h800, strict=True)]
    over_h20 = [b / a for a, b in zip(mine, h20, strict=True)]
    mixed = arm.startswith("mixed")
    return RollartRow(
        "mixed pools at equal cost",
        arm,
        parameter,
        statistics.fmean(mine),
        ratio=statistics.fmean(over_h800),
        paper_ratio="1.12 to 1.37 (H800), 1.30 to 1.68 (H20)" if mixed else "",
        ratio_least=min(over_h800),
        ratio_most=max(over_h800),
        seeds=len(mine),
        note=f"over H800 only; over H20 only {statistics.fmean(over_h20):.2f}; GPUs and batch divided by {scale}",
    )


def equal_cost_duel(
    seeds: Iterable[int] = (1, 2), *, batches: Sequence[int] = (64, 128, 192), model: str = "qwen3-8b"
) -> list[RollartRow]:
    """Two H800 (5.7 units of cost) against six H20 (6.0) with one batch of one task; `step_s` is its makespan.

    `ratio` is the time of H20 over that of H800: above 1, H800 are faster.
    """
    seeds = tuple(seeds)
    rows = []
    for task, paper in (("frozenlake", "up to 1.89"), ("math", "0.49 to 0.79")):
        for lost in (False, True):
            for batch in batches:
                ratios, seconds = [], []
                for seed in seeds:
                    trajectories = planned((task,), batch // MEMBERS, seed)
                    times = []
                    for h800, h20 in ((2, 0), (0, 6)):
                        fleet = pools_of(h800, h20).fleet(model, max_context_tokens=CONTEXT_TOKENS)
                        arm = RolloutArm(task, without_prefixes(fleet) if lost else fleet)
                        times.append(play(arm, trajectories, batch, seed).makespan_s)
                    seconds.append(times[0])
                    ratios.append(times[1] / times[0])
                found = "prefixes lost" if lost else "prefixes found"
                rows.append(
                    RollartRow(
                        "equal-cost duel",
                        f"{task}: 2 H800 over 6 H20",
                        f"batch {batch}, {found}",
                        statistics.fmean(seconds),
                        ratio=statistics.fmean(ratios),
                        paper_ratio=paper,
                        ratio_least=min(ratios),
                        ratio_most=max(ratios),
                        seeds=len(seeds),
                        note="rollout alone; paper: H20 seconds over H800 seconds",
                    )
                )
    return rows
