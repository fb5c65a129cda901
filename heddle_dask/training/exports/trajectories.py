"""Trajectories of a stored run, written one by one in a form of another program."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, WriteFailed
from heddle_dask.records.reader import RunReader
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.training.exports.atif import atif_trajectory
from heddle_dask.training.exports.openai_chat import chat_lines
from heddle_dask.training.exports.openenv import openenv_trace
from heddle_dask.training.exports.token_facts import ExportedRun
from heddle_dask.training.exports.told_messages import Decode
from heddle_dask.training.exports.verifiers import verifiers_trace

TRAJECTORY_FORMS = ("atif", "openenv", "verifiers", "openai")
WITHOUT_TEXT = frozenset({"openenv"})
"""Forms of token ids alone."""


@dataclass(frozen=True, slots=True)
class ExportedTrajectories:
    """What was written; `left_out`: trajectories without the reward asked for, or without anything to write."""

    trajectories: int
    documents: int
    left_out: int


def export_trajectories(
    run: RunReader, out: Path, form: str, decode: Decode | None = None, least_reward: float | None = None
) -> ExportedTrajectories:
    """Write the trajectories of a run: for ``atif`` a folder with a file of each, else one file of JSON lines.

    Parameters
    ----------
    decode
        Needed for all forms but `WITHOUT_TEXT`.
    least_reward
        Of the trajectories that are written; None: all of them.

    Raises
    ------
    BadInput
        `out` exists, or the run is damaged; then there is no new file.
    WriteFailed
    """
    if out.exists():
        raise BadInput(f"{out} exists: choose another path")
    documents_of = _maker(form, ExportedRun.of(run.path.stem, run.metadata), decode)
    aside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    write = _write_files if form == "atif" else _write_lines
    counts = _Counts()
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        write(aside, counts.following(run, documents_of, least_reward))
        os.replace(aside, out)
    except OSError as error:
        raise WriteFailed.of(out, error) from None
    return ExportedTrajectories(counts.trajectories, counts.documents, len(run) - counts.trajectories)


@dataclass(slots=True)
class _Counts:
    trajectories: int = 0
    documents: int = 0

    def following(
        self,
        run: RunReader,
        documents_of: Callable[[TrajectoryRecord], list[dict[str, Any]]],
        least_reward: float | None,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each document with the id of its trajectory, counted."""
        for record in run:
            if least_reward is not None and (record.reward is None or record.reward < least_reward):
                continue
            documents = documents_of(record)
            self.trajectories += bool(documents)
            for document in documents:
                self.documents += 1
                yield record.trajectory_id, document


def _maker(form: str, run: ExportedRun, decode: Decode | None) -> Callable[[TrajectoryRecord], list[dict[str, Any]]]:
    def some(document: dict[str, Any] | None) -> list[dict[str, Any]]:
        return [] if document is None else [document]

    if form == "openenv":
        return lambda record: some(openenv_trace(record, run))
    assert decode is not None
    if form == "atif":
        return lambda record: some(atif_trajectory(record, run, decode))
    if form == "verifiers":
        return lambda record: some(verifiers_trace(record, run, decode))
    return lambda record: chat_lines(record, decode)


def _write_lines(path: Path, documents: Iterator[tuple[str, dict[str, Any]]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for _, document in documents:
            file.write(f"{json.dumps(document, allow_nan=False, ensure_ascii=False)}\n")


def _write_files(folder: Path, documents: Iterator[tuple[str, dict[str, Any]]]) -> None:
    folder.mkdir()
    for number, (name, document) in enumerate(documents):
        path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)[:120]}.json"
        if path.exists():
            path = folder / f"{path.stem}-{number}.json"
        path.write_text(json.dumps(document, allow_nan=False, ensure_ascii=False), encoding="utf-8")
