"""Rows of the benchmark ``actions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.tables import Column, ExperimentRow


@dataclass(frozen=True, slots=True)
class ActionRow(ExperimentRow):
    """One arm; its ratio is its mean ACT over that of ours, unless `note` says otherwise.

    Attributes
    ----------
    batch
        Trajectories.
    act_mean_s, act_p99_s
        Action completion time: mean and 99th percentile.
    step_s
        Seconds of the rollout with its rewards, without training; 0: not measured.
    gpus, cores
        Size of the pool that runs the actions.
    overhead_share
        Overhead over execution; 0 where there is none, or where it is not measured.
    step_ratio
        `step_s` of this arm over that of ours, mean over seeds; 0: none.
    """

    batch: int
    act_mean_s: float
    act_p99_s: float = 0.0
    step_s: float = 0.0
    gpus: int = 0
    cores: int = 0
    overhead_share: float = 0.0
    step_ratio: float = 0.0

    COLUMNS: ClassVar[Sequence[Column]] = (
        ("arm", lambda row: row.arm),
        ("batch", lambda row: f"{row.batch:,d}"),
        (
            "pool",
            lambda row: f"{row.cores:,d} cores" if row.cores else f"{row.gpus} GPUs" if row.gpus else "",
        ),
        ("ACT mean", lambda row: _seconds(row.act_mean_s)),
        ("ACT p99", lambda row: _seconds(row.act_p99_s)),
        ("step", lambda row: _seconds(row.step_s)),
        ("overhead", lambda row: f"{row.overhead_share:.1%}" if row.overhead_share else ""),
        ("ratio", lambda row: f"{row.ratio:.2f}" if row.ratio else ""),
        ("range", lambda row: f"{row.ratio_least:.2f} to {row.ratio_most:.2f}" if row.ratio_most else ""),
        ("paper", lambda row: row.paper_ratio),
        ("steps", lambda row: f"{row.step_ratio:.2f}" if row.step_ratio else ""),
        ("notes", lambda row: row.note),
    )


def _seconds(value: float) -> str:
    if not value:
        return ""
    return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value:,.1f} s" if value >= 100 else f"{value:.2f} s"
