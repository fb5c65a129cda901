"""Rows of the benchmark ``actions``: one arm of one experiment, and its ratio to the arm that it is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.experiment_tables import experiment_tables, rounded


@dataclass(frozen=True, slots=True)
class ActionRow:
    """One arm of one experiment.

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
    ratio
        Mean ACT of this arm over that of ours, or what `note` says; 0: none.
    ratio_least, ratio_most
        Least and largest ratio over seeds, or over the swept constants.
    step_ratio
        `step_s` of this arm over that of ours, mean over seeds; 0: none.
    paper_ratio
        What ARL-Tangram reports; empty: nothing comparable.
    seeds
        Seeds that were measured.
    note
        Conditions that the other fields do not name.
    """

    experiment: str
    arm: str
    batch: int
    act_mean_s: float
    act_p99_s: float = 0.0
    step_s: float = 0.0
    gpus: int = 0
    cores: int = 0
    overhead_share: float = 0.0
    ratio: float = 0.0
    ratio_least: float = 0.0
    ratio_most: float = 0.0
    step_ratio: float = 0.0
    paper_ratio: str = ""
    seeds: int = 1
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """A JSON-able row, rounded."""
        return {name: rounded(value) for name, value in asdict(self).items()}


_COLUMNS = (
    "arm",
    "batch",
    "pool",
    "ACT mean",
    "ACT p99",
    "step",
    "overhead",
    "ratio",
    "range",
    "paper",
    "steps",
    "notes",
)


def row_from(given: Mapping[str, Any] | ActionRow) -> ActionRow:
    """A row of another module of this package, as a mapping with some of the fields of `ActionRow`."""
    if isinstance(given, ActionRow):
        return given
    known = {name: given[name] for name in ActionRow.__dataclass_fields__ if given.get(name) is not None}
    spread = given.get("range")
    if isinstance(spread, Sequence) and not isinstance(spread, str) and len(spread) == 2:
        known["ratio_least"], known["ratio_most"] = (float(each) for each in spread)
    known["paper_ratio"] = str(known.get("paper_ratio", ""))
    return ActionRow(**known)


def tables(rows: Iterable[ActionRow]) -> list[str]:
    """Markdown lines: a table for each experiment, in order of their first rows."""
    return experiment_tables(rows, _COLUMNS, _cells)


def _cells(row: ActionRow) -> list[str]:
    pool = f"{row.cores:,d} cores" if row.cores else f"{row.gpus} GPUs" if row.gpus else ""
    spread = f"{row.ratio_least:.2f} to {row.ratio_most:.2f}" if row.ratio_most else ""
    return [
        row.arm,
        f"{row.batch:,d}",
        pool,
        _seconds(row.act_mean_s),
        _seconds(row.act_p99_s),
        _seconds(row.step_s),
        f"{row.overhead_share:.1%}" if row.overhead_share else "",
        f"{row.ratio:.2f}" if row.ratio else "",
        spread,
        row.paper_ratio,
        f"{row.step_ratio:.2f}" if row.step_ratio else "",
        row.note,
    ]


def _seconds(value: float) -> str:
    if not value:
        return ""
    return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value:,.1f} s" if value >= 100 else f"{value:.2f} s"
