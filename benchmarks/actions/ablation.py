"""Which options of the action strategies are worth their place: arms on the small world of `action_world`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.actions.action_world import AblationBatch, ActionWorld
from benchmarks.opponents import FIXED, PER_TRAJECTORY, WORKER_POOLS

ARMS = (
    "fcfs-minimum",
    f"{FIXED},units=2",
    f"{FIXED},units=4",
    f"{FIXED},units=8",
    f"{FIXED},units=16",
    f"{PER_TRAJECTORY},cpus=4",
    f"{WORKER_POOLS},workers=32,kinds=tool:96x1/reward:16x4",
    "elastic,start_efficiency=1,depth=0",
    "elastic,start_efficiency=1",
    "elastic,start_efficiency=1,depth=6,ahead=all",
    "elastic,depth=0",
    "elastic",
    "elastic,start_efficiency=0.8",
    "elastic,order=tail",
)


@dataclass(frozen=True, slots=True)
class AblationRow:
    """Means over the seeds, in seconds: completion of actions, of tools and rewards alone, and the last trajectory.

    Attributes
    ----------
    known
        Whether speed-ups are declared; otherwise they are learned within the batch.
    """

    arm: str
    known: bool
    mean_s: float
    tool_s: float
    reward_s: float
    makespan_s: float


def ablation_rows(
    workload: AblationBatch,
    arms: Sequence[tuple[str, bool]],
    *,
    hosts: int,
    cpus: int,
    seeds: Sequence[int],
) -> Iterator[AblationRow]:
    """A row per arm; an arm is a strategy of actions and whether speed-ups are declared.

    Raises
    ------
    BadInput
        Unknown strategy or option.
    """
    for arm, known in arms:
        figures = [
            ActionWorld(workload.lives(seed), arm, hosts=hosts, cpus=cpus, known=known, seed=seed).run()
            for seed in seeds
        ]
        yield AblationRow(
            arm,
            known,
            round(statistics.fmean(each.mean_s for each in figures), 3),
            round(statistics.fmean(statistics.fmean(each.completion_s["tool"]) for each in figures), 3),
            round(statistics.fmean(statistics.fmean(each.completion_s["reward"]) for each in figures), 3),
            round(statistics.fmean(each.makespan_s for each in figures), 2),
        )
