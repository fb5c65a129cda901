"""Finds the trajectories in files of logs; the form is that of the content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.core.plain_files import open_plain, plain_lines, read_plain
from heddle_dask.workloads.imported.atif import atif_trajectories, is_atif
from heddle_dask.workloads.imported.chat_logs import ChatLogs
from heddle_dask.workloads.imported.trace_lines import ImportedTrajectory
from heddle_dask.workloads.imported.typed_json import json_object


def logged_trajectories(sources: Sequence[Path]) -> Iterator[ImportedTrajectory]:
    """The trajectories of files, and of all ``.json`` and ``.jsonl`` files in folders, in the order of their names.

    In folders, JSON files that are no ATIF are passed over: others lie beside it.

    Raises
    ------
    BadInput
        A file cannot be read or has another form, or there is no trajectory.
    """
    found = False
    for source in sources:
        is_folder = source.is_dir()
        files = sorted(path for path in source.rglob("*.json*") if path.is_file()) if is_folder else [source]
        for path in files:
            # Harbor calls the file of each trial the same.
            name = str(path.relative_to(source).with_suffix("")) if is_folder else path.name.partition(".")[0]
            for one in _of_file(path, name, skips=is_folder):
                found = True
                yield one
    if not found:
        raise BadInput(f"{sources[0]}: no trajectory: give ATIF documents (.json) or lines of chats (.jsonl)")


def _of_file(path: Path, name: str, *, skips: bool) -> Iterator[ImportedTrajectory]:
    try:
        if path.suffix == ".json":
            data = json_object(read_plain(path), str(path))
            if is_atif(data) or not skips:
                yield from atif_trajectories(data, name, str(path))
            return
        logs = ChatLogs(name)
        with open_plain(path) as file:
            for number, line in enumerate(plain_lines(file), 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    data = json_object(line, where)
                    if is_atif(data):
                        yield from atif_trajectories(data, f"{name}-{number}", where)
                    else:
                        logs.take(data, number, where)
        yield from logs.trajectories()
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}: give a file or a folder of logs") from None
