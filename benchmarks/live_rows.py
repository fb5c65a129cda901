"""Rows of the benchmark ``live`` in a file: each is written when its run ends, and not run again."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import click

from benchmarks.live_setup import Fleet, LiveRow, Workload
from benchmarks.row_file import RowFile
from heddle_dask.cli.code_digest import code_digest


def conditions_text(fleet: Fleet, workload: Workload, *, warm: bool) -> str:
    """What rows have in common that may be compared, beside trace and seed."""
    spec = fleet.spec
    options = f"{spec.named_slots} slots, contexts of {spec.named_context_tokens}, {fleet.cost.capacity_tokens} of KV"
    drawn = f"{workload.tasks} tasks, tokens x {workload.token_scale:g}, tools x {workload.tool_scale:g}"
    return f"{drawn}; {fleet.engines} {spec.kind}, {options}, {'warm' if warm else 'cold'}"


class LiveRows:
    """The rows of one seed under the same conditions.

    Parameters
    ----------
    out
        The file; None: rows are printed only.
    """

    def __init__(self, out: Path | None, *, seed: int, simulated: bool, conditions: str) -> None:
        self._file = RowFile(out)
        self._file.check_writable()
        self._common = {"kind": "live", "seed": seed, "simulated": simulated, "conditions": conditions}

    def add(self, row: LiveRow) -> None:
        """Take the row of a run that has ended, and say so."""
        click.echo(
            f"{row.workload} {row.arm} {row.repeat}: {row.makespan_s:.1f} s, {row.tokens_per_s:.0f} tokens/s",
            err=True,
        )
        self._file.add({**self._common, **asdict(row), "code": code_digest()})

    def known(self, workload: str, arm: str, repeat: int) -> LiveRow | None:
        """The row of a run that the file has."""
        row = self._file.find({**self._common, "workload": workload, "arm": arm, "repeat": repeat})
        return None if row is None else LiveRow(**{each.name: row[each.name] for each in fields(LiveRow)})
