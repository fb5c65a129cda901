"""Rows of runs by their keys, in memory and in a JSON-lines file that gets each row as its run ends.

A sweep of hours may be interrupted at any time: rows in the file are not run again. An incomplete last line is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from heddle_dask.core.errors import BadInput

ROWS_OUT = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="JSON lines; a run is added when it ends, and skipped if the file has it.",
)
Row = Mapping[str, Any]
CONDITIONS = ("cluster", "trajectories", "samples", "max_context_tokens")
_WHERE = ("kind", "model", "workload", "seed", *CONDITIONS)
# Key fields of a row, by kind. A job is a text that says everything, and its figures are those of one version.
_KEYS = {
    "run": (*_WHERE, "arm", "engines"),
    "degrees": (*_WHERE, "predictor"),
    "pass": (*_WHERE, "token_scale", "tool_scale", "engines", "arm", "predictor"),
    "fault": ("kind", "fault"),
    "job": ("kind", "of", "job", "code"),
    "live": ("kind", "workload", "seed", "simulated", "conditions", "arm", "repeat"),
    "fidelity": ("kind", "workload", "seed", "conditions", "arm", "repeat"),
    "training": ("kind", "env", "seed", "conditions", "arm"),
    "evaluation": ("kind", "env", "seed", "conditions", "arm", "number"),
}


class RowFile:
    """All rows by their keys.

    Parameters
    ----------
    path
        The file; None: rows are kept in memory only.

    Raises
    ------
    BadInput
        The file cannot be read or written, or has other content.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._rows: dict[tuple[Any, ...], Row] = {}
        if path is not None:
            for row in _read(path):
                self._rows[_key(row, path)] = row

    def rows(self, kind: str) -> list[Row]:
        """All rows of a kind, sorted by key: the order in the file does not matter."""
        found = [(key, row) for key, row in self._rows.items() if row["kind"] == kind]
        return [row for _, row in sorted(found, key=lambda pair: pair[0])]

    def find(self, row: Row) -> Row | None:
        """The row with the key of `row`, of which only the key fields are used."""
        return self._rows.get(_key(row, self._path))

    def add(self, row: Row) -> None:
        """Add a row; it is in the file when this returns."""
        self._rows[_key(row, self._path)] = row
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            raise BadInput(f"{self._path}: {error.strerror}; give a file that can be written") from None

    def other_code(self, code: str) -> str:
        """A warning if rows were made by other code than this; empty without any."""
        others = sum(row["code"] != code for row in self._rows.values())
        return f"{others} rows of --out were made by other code than this ({code}); they are kept" if others else ""

    def check_writable(self) -> None:
        """Check before hours of runs that rows can be written; drops an incomplete last line, and makes no file.

        Raises
        ------
        BadInput
            The file cannot be written.
        """
        if self._path is None:
            return
        made = not self._path.exists() and not self._path.is_symlink()
        try:
            with self._path.open("ab+") as file:
                file.seek(0)
                content = file.read()
                file.truncate(content.rfind(b"\n") + 1)
            if made:
                self._path.unlink()
        except OSError as error:
            raise BadInput(f"{self._path}: {error.strerror}; give a file that can be written") from None


def _read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    whole = content[: content.rfind("\n") + 1]
    rows: list[Row] = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or row.get("kind") not in _KEYS:
            raise BadInput(f"{path}, line {number}: no row of a benchmark: give another file")
        rows.append(row)
    return rows


def _key(row: Row, path: Path | None) -> tuple[Any, ...]:
    try:
        return tuple(row[name] for name in _KEYS[row["kind"]])
    except KeyError as error:
        raise BadInput(f"{path}: a row lacks {error}: give another file") from None
