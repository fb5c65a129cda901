"""The checkpoints of a run on disk, and the models beside them: complete or absent, those kept that may be needed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from heddle_dask.core.errors import BadInput, WriteFailed
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.records import synced_store
from heddle_dask.training.trainer_spec import checkpoint_name

RECORD = "trainer.json"
"""In each checkpoint and model: its version, the model it was trained from, and the report of its step."""
BEST = "best.json"
MODELS = "models"
# One that was evaluated, and the next one, which may be published before the evaluation has ended.
_MODELS_KEPT: Final = 2


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What a checkpoint says of itself.

    Attributes
    ----------
    model
        Digest of the shape and tokenizer of its model.
    metrics, seconds
        See `TrainReport`.
    """

    lineage: str
    number: int
    model: str
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.lineage, self.number)


def read_record(checkpoint: Path) -> CheckpointRecord:
    try:
        return CheckpointRecord(**json.loads((checkpoint / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(f"{checkpoint} is no checkpoint of a trainer: {' '.join(str(error).split())}") from None


class CheckpointFolder:
    """The checkpoints of one lineage in a directory, which may hold those of others.

    A checkpoint is written beside its name: `begin` says where, `complete` gives it its name.
    """

    def __init__(self, folder: Path, lineage: str, keep: int) -> None:
        self._folder = folder
        self._lineage = lineage
        self._keep = keep

    def newest(self) -> tuple[Path, CheckpointRecord] | None:
        present = self._present(self._folder)
        if not present:
            return None
        path = present[max(present)]
        return path, read_record(path)

    @property
    def oldest_number(self) -> int:
        """Optimiser steps of the oldest checkpoint; 0: there is none."""
        return min(self._present(self._folder), default=0)

    def begin(self, record: CheckpointRecord) -> Path:
        """An empty directory for this checkpoint; what is left of others that were not completed goes.

        Raises
        ------
        WriteFailed
        """
        return _begin(self._folder / checkpoint_name(record.version))

    def complete(self, record: CheckpointRecord) -> Path:
        """All of it is written: it has its name now, and older ones go.

        A checkpoint of another lineage that has the name is moved aside, never overwritten.

        Raises
        ------
        WriteFailed
        """
        path = self._complete(self._folder / checkpoint_name(record.version), record)
        present = self._present(self._folder)
        _remove(present[number] for number in sorted(present)[: -self._keep])
        return path

    def has_model(self, version: PolicyVersion) -> bool:
        return version.lineage == self._lineage and version.number in self._present(self._folder / MODELS)

    def write_model(self, record: CheckpointRecord, fill: Callable[[Path], None]) -> Path:
        """Write weights as a model directory, unless there is one of this version.

        The two newest and the best one are kept.

        Raises
        ------
        WriteFailed
        """
        path = self._folder / MODELS / checkpoint_name(record.version)
        if self.has_model(record.version):
            return path
        try:
            fill(_begin(path))
        except OSError as error:
            raise WriteFailed.of(path, error) from None
        self._complete(path, record)
        self._prune_models()
        return path

    def keep_best(self, version: PolicyVersion, reward: float) -> Path:
        """Name the best model: it stays, and the one that was the best before may go."""
        path = self._folder / MODELS / checkpoint_name(version)
        if not self.has_model(version):
            raise BadInput(f"weights {version} are not kept: publish them as evaluated")
        body = {
            "lineage": version.lineage,
            "number": version.number,
            "reward": reward,
            "model": f"{MODELS}/{path.name}",
        }
        aside = self._folder / f".{BEST}.partial"
        aside.write_text(json.dumps(body), encoding="utf-8")
        synced_store.sync_path(aside)
        os.replace(aside, self._folder / BEST)
        self._prune_models()
        return path

    def best(self) -> dict[str, Any] | None:
        try:
            body: dict[str, Any] = json.loads((self._folder / BEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return body

    def _complete(self, path: Path, record: CheckpointRecord) -> Path:
        aside = _aside(path)
        try:
            (aside / RECORD).write_text(json.dumps(asdict(record)), encoding="utf-8")
            for file in aside.rglob("*"):
                synced_store.sync_path(file)
            synced_store.sync_path(aside)
            if path.exists():
                self._make_room(path)
            aside.rename(path)
            synced_store.sync_path(path.parent)
        except OSError as error:
            raise WriteFailed.of(path, error) from None
        return path

    def _present(self, folder: Path) -> dict[int, Path]:
        found = {}
        for path in folder.glob("step-*"):
            try:
                record = read_record(path)
            except BadInput:
                if (path / RECORD).is_file():
                    raise
                continue  # incomplete, or one that another thread has just removed
            if record.lineage == self._lineage:
                found[record.number] = path
        return found

    def _make_room(self, path: Path) -> None:
        lineage = read_record(path).lineage if (path / RECORD).is_file() else "unknown"
        if lineage == self._lineage:
            shutil.rmtree(path)
        else:
            path.rename(path.with_name(f"{path.name}.{lineage}"))

    def _prune_models(self) -> None:
        present = self._present(self._folder / MODELS)
        best = self.best()
        kept = {*sorted(present)[-_MODELS_KEPT:]}
        if best is not None and best["lineage"] == self._lineage:
            kept.add(best["number"])
        _remove(path for number, path in present.items() if number not in kept)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _begin(path: Path) -> Path:
    aside = _aside(path)
    try:
        for left in path.parent.glob(".step-*"):
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteFailed.of(path, error) from None
    return aside


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        # Never half a checkpoint under its name.
        gone = path.with_name(f".{path.name}.removed")
        path.rename(gone)
        shutil.rmtree(gone)
