"""Rows of the benchmark ``rollart``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from benchmarks.tables import Column, ExperimentRow


@dataclass(frozen=True, slots=True)
class RollartRow(ExperimentRow):
    """One arm at one parameter. Values are means over seeds, and a ratio says how much faster, as RollArt defines it.

    Attributes
    ----------
    parameter
        What is varied in the experiment, as a text.
    step_s
        Seconds of a training step, or of a rollout where `note` says so.
    tokens_per_s
        RollArt's throughput: prompt and sampled tokens of a batch over the seconds of a step.
    wait_share
        Share of the time in which the trainer did not train.
    exposed_s
        Seconds of a step for which engines were paused for weights.
    wasted
        Wasted tokens over all sampled ones, by cause.
    ages
        Share of the trained trajectories by n - b.
    sampled_length, trained_length
        Mean sampled tokens of the trajectories that were started, and of those that were trained on.
    fitted
        What of it was fitted to a number of the paper.
    """

    parameter: str
    step_s: float
    tokens_per_s: float = 0.0
    wait_share: float = 0.0
    exposed_s: float = 0.0
    wasted: Mapping[str, float] = field(default_factory=dict)
    ages: Mapping[str, float] = field(default_factory=dict)
    sampled_length: float = 0.0
    trained_length: float = 0.0
    gpus: int = 0
    trainer_gpus: int = 0
    fitted: str = ""

    COLUMNS: ClassVar[Sequence[Column]] = (
        ("arm", lambda row: row.arm),
        ("parameter", lambda row: row.parameter),
        ("step", lambda row: f"{row.step_s:,.1f} s"),
        ("tokens/s", lambda row: f"{row.tokens_per_s:,.0f}" if row.tokens_per_s else ""),
        ("ratio", lambda row: f"{row.ratio:.2f}" if row.ratio else ""),
        ("range", lambda row: _range(row)),
        ("paper", lambda row: row.paper_ratio),
        ("trainer GPUs", lambda row: f"{row.trainer_gpus} of {row.gpus}" if row.trainer_gpus else ""),
        ("trainer waits", lambda row: f"{row.wait_share:.0%}" if row.wait_share else ""),
        ("paused", lambda row: f"{row.exposed_s:.1f} s" if row.exposed_s else ""),
        (
            "wasted",
            lambda row: ", ".join(f"{s:.0%} {cause}" for cause, s in row.wasted.items() if s >= 0.005),
        ),
        (
            "ages",
            lambda row: ", ".join(f"{age}: {share:.0%}" for age, share in row.ages.items() if share >= 0.005),
        ),
        ("length started/trained", lambda row: _lengths(row)),
        ("fitted to the paper", lambda row: row.fitted),
        ("notes", lambda row: row.note),
    )


def _range(row: RollartRow) -> str:
    return f"{row.ratio_least:.2f} to {row.ratio_most:.2f}" if row.seeds > 1 and row.ratio_most else ""


def _lengths(row: RollartRow) -> str:
    return f"{row.sampled_length:,.0f}/{row.trained_length:,.0f}" if row.trained_length else ""
