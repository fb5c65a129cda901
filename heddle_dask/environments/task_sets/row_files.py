"""Rows of files: JSON Lines, JSON, Parquet, and folders of them, also those that the package `datasets` saves."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, text_of

ROW_ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_OF_A_SPLIT = ("dataset_info.json", "state.json")
_OF_SPLITS = "dataset_dict.json"
Row = Mapping[str, Any]


def path_and_split(text: str) -> tuple[Path, str]:
    """A path, with the split behind a colon, if there is one."""
    path = Path(text)
    if path.exists() or ":" not in text:
        return path, ""
    place, _, split = text.rpartition(":")
    return Path(place), split


def rows_of(text: str) -> list[Row]:
    """All rows of a file, or of a folder, in their order.

    Parameters
    ----------
    text
        A path, with ``:SPLIT`` where a folder has several.

    Raises
    ------
    BadInput
        There is nothing to read, a split must be named, or a file is damaged.
    """
    path, split = path_and_split(text)
    if not path.exists():
        raise BadInput(f"tasks {text!r}: there is no such path")
    if path.is_file():
        if split:
            raise BadInput(f"tasks {text!r}: a file has no splits: leave :{split} away")
        files: Sequence[Path] = [path]
    else:
        files = _files_of_split(path, split, text)
    rows = [row for file in files for row in _rows(file)]
    if not rows:
        raise BadInput(f"tasks {text!r}: it has no rows")
    return rows


def first_row(text: str) -> Row | None:
    """The first row, if there is one that can be read."""
    path, split = path_and_split(text)
    try:
        files = [path] if path.is_file() else _files_of_split(path, split, text)
        return next(_rows(files[0]), None)
    except (BadInput, IndexError):
        return None


def _files_of_split(folder: Path, split: str, text: str) -> Sequence[Path]:
    splits = _splits(folder)
    if not splits:
        raise BadInput(f"tasks {text!r}: no rows there: use {', '.join(ROW_ENDINGS)} or what datasets has saved")
    if not split and len(splits) > 1:
        raise BadInput(f"tasks {text!r} has the splits {', '.join(splits)}: name one, as in {folder}:{min(splits)}")
    if split and split not in splits:
        raise BadInput(f"tasks {text!r}: no split {split!r}; there is {', '.join(splits) or 'none'}")
    return splits[split or next(iter(splits))]


def _splits(folder: Path) -> dict[str, list[Path]]:
    """The files of each split of a folder; one without a name where nothing says which it is."""
    if all((folder / name).is_file() for name in _OF_A_SPLIT):
        return {"": [folder]}
    if (folder / _OF_SPLITS).is_file():
        try:
            names = json.loads((folder / _OF_SPLITS).read_text())["splits"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(f"tasks {str(folder / _OF_SPLITS)!r}: cannot be read: {text_of(error)}") from error
        return {name: [folder / name] for name in names}
    # What is published has its files here, or in a folder `data`.
    data = [path for path in (folder, folder / "data") if path.is_dir()]
    files = sorted(path for place in data for path in place.iterdir() if path.name.endswith(ROW_ENDINGS))
    splits: dict[str, list[Path]] = {}
    for path in files:
        # train-00000-of-00002.parquet, as they are published; test.jsonl
        splits.setdefault(path.name.partition(".")[0].partition("-0")[0], []).append(path)
    return splits


def _rows(path: Path) -> Iterator[Row]:
    try:
        if path.is_dir():
            yield from _saved_rows(path)
        elif path.suffix == ".parquet":
            yield from _arrow().parquet.read_table(path).to_pylist()
        else:
            yield from _json_rows(path)
    except BadInput:
        raise
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise BadInput(f"tasks {str(path)!r}: cannot be read: {' '.join(str(error).split())}") from error


def _json_rows(path: Path) -> Iterator[Row]:
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    if path.suffix == ".json":
        found = json.loads(text)
        rows = list(enumerate(found if isinstance(found, list) else [found], 1))
    else:
        rows = []
        # A text may hold other characters that end a line for Python, and none for JSON Lines.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    rows.append((number, json.loads(line)))
                except ValueError as error:
                    raise BadInput(f"tasks {str(path)!r}: line {number} is no JSON: {error}") from None
    for number, row in rows:
        if not isinstance(row, dict):
            raise BadInput(f"tasks {str(path)!r}: row {number} is a {type(row).__name__}: use a JSON object")
        yield row


def _saved_rows(folder: Path) -> Iterator[Row]:
    """Rows that ``save_to_disk`` of `datasets` has written: files of Arrow, in the order of its state."""
    arrow = _arrow()
    state = json.loads((folder / "state.json").read_text())
    for each in state["_data_files"]:
        with arrow.memory_map(str(folder / each["filename"])) as source:
            yield from arrow.ipc.open_stream(source).read_all().to_pylist()


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise BadInput("Parquet and folders of datasets need pyarrow: pip install pyarrow") from None
    return pyarrow
