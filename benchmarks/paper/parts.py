"""The paper's sweep in independent parts for many processes: the runs of one arm in one cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.paper.store import PaperStore, Row
from benchmarks.paper.sweep import PaperArm, PaperCell, PaperConditions, PaperSweep

_KINDS = ("degrees", "run")


@dataclass(frozen=True, slots=True)
class PaperPart:
    """The argument of `run_part`: plain data for another process.

    Attributes
    ----------
    kept
        Existing rows, which are not made again.
    """

    conditions: PaperConditions
    cell: PaperCell
    arm: PaperArm
    seeds: tuple[int, ...]
    kept: tuple[Row, ...]
    code: str
    only_chosen: bool

    @property
    def name(self) -> str:
        """Name for display."""
        return f"{self.cell.name}, {self.arm.name}"


def parts_of(
    conditions: PaperConditions,
    cells: Sequence[PaperCell],
    arms: Sequence[PaperArm],
    seeds: Sequence[int],
    store: PaperStore,
    *,
    code: str,
    only_chosen: bool = False,
) -> list[PaperPart]:
    """The parts of a `PaperSweep` with these (checked) arguments, each with its rows in `store`."""
    rows = [row for kind in _KINDS for row in store.rows(kind)]
    return [
        PaperPart(
            conditions,
            cell,
            arm,
            tuple(seeds),
            tuple(row for row in rows if _is_of(row, cell, arm)),
            code,
            only_chosen,
        )
        for cell in cells
        for arm in arms
    ]


def _is_of(row: Row, cell: PaperCell, arm: PaperArm) -> bool:
    if (row["model"], row["workload"]) != (cell.model, cell.workload):
        return False
    return bool(row["kind"] == "degrees" or row["arm"] == arm.name)


def run_part(part: PaperPart) -> list[Row]:
    """Make the missing rows of a part: first the chosen degrees, then the runs."""
    store = PaperStore()
    for row in part.kept:
        store.add(row)
    sweep = PaperSweep(
        part.conditions,
        [part.cell],
        [part.arm],
        part.seeds,
        store,
        code=part.code,
        only_chosen=part.only_chosen,
    )
    for _ in sweep.runs():
        pass
    return [row for kind in _KINDS for row in store.rows(kind) if row not in part.kept]
