"""Prefill and decode on different engines in simulation (RollArt, Table 5): nodes of 8 H800 and of 8 H20, SWE-bench.

A batch of 128 trajectories at contexts of up to 32k tokens; the opponent is the same placement on the same nodes, where
every engine does both. KV caches travel at the rate of `cost.hardware`, and only tokens that the target lacks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from heddle_dask.benchmarks.rollart.affinity import RolloutArm, planned, pools_of
from heddle_dask.benchmarks.rollart.rows import RollartRow
from heddle_dask.benchmarks.rollart.workload import CONTEXT_TOKENS
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import simulate

BATCH = 128
NODES = ((1, 3), (2, 2), (3, 1))
PAPER = {
    ("qwen3-32b", 1): "1.03",
    ("qwen3-32b", 2): "1.05",
    ("qwen3-30b-a3b", 1): "1.11",
    ("qwen3-30b-a3b", 2): "1.21",
}
_SPLIT = "affinity=prefill-decode,prefill=H800,decode=H20"


def separated(
    seeds: Iterable[int] = (1, 2),
    *,
    models: Sequence[str] = ("qwen3-32b", "qwen3-30b-a3b"),
    nodes: Sequence[tuple[int, int]] = NODES,
    tp: int = 4,
) -> list[RollartRow]:
    """Seconds of a batch where engines do both, and with prompts on the H800: all of them, or those that gain by it.

    `ratio`: time of the first arm, on the same nodes, over that of this arm.
    """
    seeds = tuple(seeds)
    rows = []
    for model in models:
        for prefill, decode in nodes:
            fleet = pools_of(8 * prefill, 8 * decode, tp).fleet(model, max_context_tokens=CONTEXT_TOKENS)
            fleet = replace(fleet, link=replace(fleet.link, whole=False))
            place = f"{model}, {prefill}P{decode}D"
            rows += _rows(place, PAPER.get((model, prefill), ""), fleet, seeds)
    return rows


def _rows(place: str, paper: str, fleet: SimulatedFleet, seeds: Sequence[int]) -> list[RollartRow]:
    link = f"setup_s={fleet.link.setup_s},token_s={fleet.link.token_s}"
    arms = (
        RolloutArm("both on every engine", fleet),
        RolloutArm("both, least work", fleet, ("placement=least-work",)),
        RolloutArm("separated, all prompts", fleet, (f"{_SPLIT},priced=False,{link}",)),
        RolloutArm("separated, priced", fleet, (f"{_SPLIT},{link}",)),
    )
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for seed in seeds:
        trajectories = planned(("swe",), BATCH // 8, seed)
        for arm in arms:
            played = simulate(arm.preset, arm.overrides, arm.fleet, trajectories, seed=seed, name=arm.name)
            seconds[arm.name].append(played.makespan_s)
    first = seconds[arms[0].name]
    rows = []
    for arm in arms:
        ratios = [b / a for a, b in zip(seconds[arm.name], first, strict=True)]
        rows.append(
            RollartRow(
                "prefill and decode on different engines",
                arm.name,
                place,
                statistics.fmean(seconds[arm.name]),
                ratio=0.0 if arm is arms[0] else statistics.fmean(ratios),
                paper_ratio="" if arm is arms[0] else paper,
                ratio_least=min(ratios),
                ratio_most=max(ratios),
                seeds=len(seeds),
                note="seconds of a rollout of 128 trajectories",
            )
        )
    return rows
