"""Rows of ``python -m benchmarks rollart``: one arm of one experiment at one parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.experiment_tables import experiment_tables, rounded


@dataclass(frozen=True, slots=True)
class RollartRow:
    """One arm. Values are means over seeds.

    Attributes
    ----------
    parameter
        What is varied in the experiment, as a text.
    step_s
        Seconds of a training step, or of a rollout where `note` says so.
    ratio
        How much faster, as RollArt defines it for the experiment; 0: this arm is what others are compared with.
    ratio_least, ratio_most
        Least and largest ratio over seeds.
    paper_ratio
        What RollArt reports; empty: nothing comparable.
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
    """

    experiment: str
    arm: str
    parameter: str
    step_s: float
    ratio: float = 0.0
    paper_ratio: str = ""
    ratio_least: float = 0.0
    ratio_most: float = 0.0
    wait_share: float = 0.0
    exposed_s: float = 0.0
    wasted: Mapping[str, float] = field(default_factory=dict)
    ages: Mapping[str, float] = field(default_factory=dict)
    sampled_length: float = 0.0
    trained_length: float = 0.0
    gpus: int = 0
    trainer_gpus: int = 0
    seeds: int = 1
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """A JSON-able row, rounded."""
        return {name: rounded(value) for name, value in asdict(self).items()}


_COLUMNS = (
    "arm",
    "parameter",
    "step",
    "ratio",
    "range",
    "paper",
    "trainer GPUs",
    "trainer waits",
    "paused",
    "wasted",
    "ages",
    "length started/trained",
    "notes",
)


def row_of(given: Mapping[str, Any] | RollartRow) -> RollartRow:
    """A row of another module, as a mapping with some of the fields of `RollartRow`."""
    if isinstance(given, RollartRow):
        return given
    known = {name: given[name] for name in RollartRow.__dataclass_fields__ if given.get(name) is not None}
    return RollartRow(**{**known, "paper_ratio": str(known.get("paper_ratio", ""))})


def rollart_tables(rows: Iterable[RollartRow]) -> list[str]:
    """Markdown lines: a table for each experiment, in order of their first rows."""
    return experiment_tables(rows, _COLUMNS, _cells, drop_empty=True)


def _cells(row: RollartRow) -> Sequence[str]:
    lengths = f"{row.sampled_length:,.0f}/{row.trained_length:,.0f}" if row.trained_length else ""
    spread = f"{row.ratio_least:.2f} to {row.ratio_most:.2f}" if row.seeds > 1 and row.ratio_most else ""
    return (
        row.arm,
        row.parameter,
        f"{row.step_s:,.1f} s",
        f"{row.ratio:.2f}" if row.ratio else "",
        spread,
        row.paper_ratio,
        f"{row.trainer_gpus} of {row.gpus}" if row.trainer_gpus else "",
        f"{row.wait_share:.0%}" if row.wait_share else "",
        f"{row.exposed_s:.1f} s" if row.exposed_s else "",
        ", ".join(f"{share:.0%} {cause}" for cause, share in row.wasted.items() if share >= 0.005),
        ", ".join(f"{age}: {share:.0%}" for age, share in row.ages.items() if share >= 0.005),
        lengths,
        row.note,
    )
