"""Rows of `python -m benchmarks paper` by cell, arm and engines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.paper.sweep import PAPER_ARMS, PAPER_CELLS, PaperCell
from benchmarks.row_file import CONDITIONS, Row
from heddle_dask.core.errors import BadInput

BASELINES = tuple(arm.name for arm in PAPER_ARMS if arm.role == "baselines")
OURS = tuple(arm.name for arm in PAPER_ARMS if arm.role == "ours")
_PREDICTOR = {arm.name: arm.predictor for arm in PAPER_ARMS}


class PaperResults:
    """Rows by cell, arm and engines.

    Raises
    ------
    BadInput
        Rows of a model have different conditions.
    """

    def __init__(self, runs: Sequence[Row], choices: Sequence[Row]) -> None:
        self.runs, self.choices = runs, choices
        present = {(row["model"], row["workload"]) for row in runs}
        self.cells = [cell for cell in PAPER_CELLS if (cell.model, cell.workload) in present]
        self.seeds = sorted({int(row["seed"]) for row in runs})
        self.conditions: dict[str, dict[str, Any]] = {}
        for row in runs:
            its = {name: row[name] for name in CONDITIONS}
            if self.conditions.setdefault(row["model"], its) != its:
                raise BadInput(f"runs of {row['model']} under two conditions: use a file for each")
        self._run = {(_cell(row), row["arm"], row["engines"], row["seed"]): row for row in runs}
        self._choice = {(_cell(row), row["predictor"], row["seed"]): row for row in choices}

    def at_degree(self, cell: PaperCell, arm: str, degree: int) -> list[Row]:
        """Runs on uniform engines of that TP degree, in order of seed."""
        return [
            row
            for (of, name, engines, _), row in self._run.items()
            if of == cell and name == arm and _uniform_degree(engines) == degree
        ]

    def chosen(self, cell: PaperCell, arm: str) -> list[Row]:
        """Runs on the engines that the resource manager chose, in order of seed."""
        predictor = _PREDICTOR[arm]
        found = []
        for seed in self.seeds:
            choice = self._choice.get((cell, predictor, seed))
            row = None if choice is None else self._run.get((cell, arm, choice["engines"], seed))
            found += [] if row is None else [row]
        return found

    def degrees(self, cell: PaperCell, arm: str) -> list[int]:
        """Uniform TP degrees with runs of the first seed."""
        return sorted(
            degree
            for (of, name, engines, seed) in self._run
            if of == cell and name == arm and seed == self.seeds[0]
            if (degree := _uniform_degree(engines)) is not None
        )

    def best_degree(self, cell: PaperCell, arm: str) -> int | None:
        """The uniform TP degree with the least makespan of the first seed."""
        degrees = self.degrees(cell, arm)
        if not degrees:
            return None
        return min(degrees, key=lambda d: self.at_degree(cell, arm, d)[0]["makespan_s"])

    def at_best(self, cell: PaperCell, arm: str) -> list[Row]:
        """Runs at `best_degree`."""
        degree = self.best_degree(cell, arm)
        return [] if degree is None else self.at_degree(cell, arm, degree)

    def best_baseline(self, cell: PaperCell) -> str | None:
        """The baseline with the least median makespan at its best TP degree."""
        there = [name for name in BASELINES if self.at_best(cell, name)]
        return min(there, key=lambda name: median_of(self.at_best(cell, name), "makespan_s"), default=None)


def _cell(row: Row) -> PaperCell:
    return PaperCell(row["model"], row["workload"])


def _uniform_degree(engines: str) -> int | None:
    return None if "+" in engines else int(engines.partition("x")[2])


def median_of(rows: Sequence[Row], figure: str) -> float:
    """Median of a figure over the rows."""
    return float(statistics.median(row[figure] for row in rows))


def ratios(theirs: Sequence[Row], ours: Sequence[Row]) -> list[float]:
    """Makespan of `theirs` over that of `ours`, for the seeds that both have."""
    mine = {row["seed"]: row["makespan_s"] for row in ours}
    return [row["makespan_s"] / mine[row["seed"]] for row in theirs if row["seed"] in mine]
