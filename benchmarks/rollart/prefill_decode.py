"""Prefill and decode on different engines in simulation (RollArt, Table 5): nodes of 8 H800 and of 8 H20, SWE-bench.

A batch of 128 trajectories at contexts of up to 32k tokens; the opponent is the same placement on the same nodes, where
every engine does both. KV caches travel at the rate of `cost.transfers`, and only tokens that the target lacks.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.experiments import Study
from benchmarks.rollart.affinity import PoolJob, pool_figures
from benchmarks.rollart.rows import RollartRow
from benchmarks.tables import ratio_fields

BATCH = 128
NODES = ((1, 3), (2, 2), (3, 1))
PAPER = {
    ("qwen3-32b", 1): "1.03",
    ("qwen3-32b", 2): "1.05",
    ("qwen3-30b-a3b", 1): "1.11",
    ("qwen3-30b-a3b", 2): "1.21",
}
_BOTH = "both on every engine"
_SPLIT = "affinity=prefill-decode,prefill=H800,decode=H20"


def separated(
    study: Study,
    *,
    models: Sequence[str] = ("qwen3-32b", "qwen3-30b-a3b"),
    nodes: Sequence[tuple[int, int]] = NODES,
    tp: int = 4,
) -> list[RollartRow]:
    """Prefill on H800 and decode on H20 (7.4, Table 5); ratio: engines that do both over the arm.

    Seconds of a batch where engines do both, and with prompts on the H800: all of them, or those that gain by it.
    """
    rows = []
    for model in models:
        for prefill, decode in nodes:
            both = PoolJob(8 * prefill, 8 * decode, ("swe",), BATCH // 8, 0, model=model, tp=tp, whole=False)
            rows += _rows(study, f"{model}, {prefill}P{decode}D", PAPER.get((model, prefill), ""), both)
    return rows


def _rows(study: Study, place: str, paper: str, both: PoolJob) -> list[RollartRow]:
    its = both.fleet.link
    link = f"setup_s={its.setup_s},token_s={its.token_s}"
    arms = {
        _BOTH: both,
        "both, least work": replace(both, overrides=("placement=least-work",)),
        "separated, all prompts": replace(both, overrides=(f"{_SPLIT},priced=False,{link}",)),
        "separated, priced": replace(both, overrides=(f"{_SPLIT},{link}",)),
    }
    found = pool_figures(study, arms)
    rows = []
    for arm, figures in found.items():
        ratios = [b.makespan_s / a.makespan_s for a, b in zip(figures, found[_BOTH], strict=True)]
        fields = ratio_fields(ratios) | ({"ratio": 0.0} if arm == _BOTH else {"paper_ratio": paper})
        rows.append(
            RollartRow(
                "prefill and decode on different engines",
                arm,
                place,
                statistics.fmean(one.makespan_s for one in figures),
                **fields,
                seeds=len(figures),
                note="seconds of a rollout of 128 trajectories",
            )
        )
    return rows
