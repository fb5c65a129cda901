"""Rows of live runs in a file (`live`, `fidelity`): each is written when its run ends, and not run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic

import click

from benchmarks.code_digest import code_digest
from benchmarks.live_setup import Fleet, Workload
from benchmarks.row_file import Row, RowFile
from benchmarks.runner import F


def conditions_text(fleet: Fleet, workload: Workload, *, warm: bool) -> str:
    """What rows have in common that may be compared, beside trace and seed."""
    spec = fleet.spec
    options = f"{spec.named_slots} slots, contexts of {spec.named_context_tokens}, {fleet.cost.capacity_tokens} of KV"
    drawn = f"{workload.tasks} tasks, tokens x {workload.token_scale:g}, tools x {workload.tool_scale:g}"
    return f"{drawn}; {fleet.engines} {spec.kind}, {options}, {'warm' if warm else 'cold'}"


class LiveRows(Generic[F]):
    """The rows of runs under the same conditions: `rows` has those that were made or asked for, in that order.

    Parameters
    ----------
    out
        The file; None: rows are kept in memory only.
    common
        Fields that all have, their kind among them.
    made
        A run from its row.
    told
        A new run in a line.
    """

    def __init__(
        self, out: Path | None, common: Mapping[str, Any], made: Callable[[Row], F], told: Callable[[F], str]
    ) -> None:
        self.rows: list[F] = []
        self._file = RowFile(out)
        self._file.check_writable()
        self._common, self._made, self._told = common, made, told

    def add(self, run: F) -> None:
        """Take a run that has ended, and say so."""
        click.echo(self._told(run), err=True)
        self._file.add({**self._common, **asdict(run), "code": code_digest()})
        self.rows.append(run)

    def has(self, workload: str, arm: str, repeat: int) -> bool:
        """Whether the file has this run, which `rows` has then too."""
        row = self._file.find({**self._common, "workload": workload, "arm": arm, "repeat": repeat})
        if row is not None:
            self.rows.append(self._made(row))
        return row is not None
