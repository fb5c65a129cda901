"""Files of JSON lines that survive a crash: whole lines are kept, a torn last one is cut off."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, WriteFailed
from heddle_dask.core.plain_files import read_plain


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows at the end; afterwards they are on disk. nan and infinities become None.

    Raises
    ------
    WriteFailed
    """
    text = "".join(json.dumps(plain_numbers(row), allow_nan=False) + "\n" for row in rows)
    if not text:
        return
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WriteFailed.of(path, error) from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file. What a crash left half written at the end is no row.

    Raises
    ------
    BadInput
        A line before the last one is no JSON object.
    """
    try:
        lines = read_plain(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise BadInput(f"{path}, line {number} is no JSON object: restore the file, or give another run")
        rows.append(row)
    return rows


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by these rows, in one step.

    Raises
    ------
    WriteFailed
    """
    aside = path.with_name(f"{path.name}.partial")
    aside.unlink(missing_ok=True)
    try:
        aside.touch()
        append_lines(aside, rows)
        os.replace(aside, path)
    except OSError as error:
        raise WriteFailed.of(path, error) from None


def plain_numbers(value: Any) -> Any:
    """The same value with None in place of nan and infinities, and Python numbers in place of NumPy's."""
    if isinstance(value, Mapping):
        return {str(key): plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        value = value.item()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
