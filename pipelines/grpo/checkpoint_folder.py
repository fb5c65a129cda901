"""The checkpoints of a run on disk: complete or absent, the newest ones and the best one kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, WriteFailed
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.records import synced_store
from heddle_dask.training.trainer_spec import checkpoint_name

RECORD = "trainer.json"
"""In each checkpoint: its version, the model it was trained from, and the report of its step."""
BEST = "best.json"


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
    """The checkpoints of one lineage in a directory, which may hold those of others."""

    def __init__(self, folder: Path, lineage: str, keep: int) -> None:
        self._folder = folder
        self._lineage = lineage
        self._keep = keep

    def find(self, version: PolicyVersion) -> Path | None:
        return self._present().get(version.number) if version.lineage == self._lineage else None

    def newest(self) -> tuple[Path, CheckpointRecord] | None:
        present = self._present()
        if not present:
            return None
        path = present[max(present)]
        return path, read_record(path)

    def write(self, record: CheckpointRecord, fill: Callable[[Path], None]) -> Path:
        """Write a checkpoint beside its name and rename it; then remove older ones.

        A checkpoint of another lineage that has the name is moved aside, never overwritten.

        Raises
        ------
        WriteFailed
        """
        path = self._folder / checkpoint_name(record.version)
        aside = path.with_name(f".{path.name}.partial")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            fill(aside)
            (aside / RECORD).write_text(json.dumps(asdict(record)), encoding="utf-8")
            for file in aside.rglob("*"):
                synced_store.sync_path(file)
            synced_store.sync_path(aside)
            self._make_room(path)
            aside.rename(path)
            synced_store.sync_path(self._folder)
        except OSError as error:
            raise WriteFailed.of(path, error) from None
        self._prune()
        return path

    def keep_best(self, version: PolicyVersion, reward: float) -> Path:
        """Name the best checkpoint: it stays, and the one that was the best before may go."""
        path = self.find(version)
        if path is None:
            raise BadInput(f"checkpoint {version} has been removed already: keep more checkpoints")
        body = {
            "lineage": version.lineage,
            "number": version.number,
            "reward": reward,
            "checkpoint": path.name,
        }
        aside = self._folder / f".{BEST}.partial"
        aside.write_text(json.dumps(body), encoding="utf-8")
        synced_store.sync_path(aside)
        os.replace(aside, self._folder / BEST)
        self._prune()
        return path

    def best(self) -> dict[str, Any] | None:
        try:
            body: dict[str, Any] = json.loads((self._folder / BEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return body

    def _present(self) -> dict[int, Path]:
        found = {}
        for path in self._folder.glob("step-*"):
            if (path / RECORD).is_file():
                record = read_record(path)
                if record.lineage == self._lineage:
                    found[record.number] = path
        return found

    def _make_room(self, path: Path) -> None:
        if not path.exists():
            return
        record = read_record(path)
        if record.lineage == self._lineage:
            shutil.rmtree(path)
        else:
            path.rename(path.with_name(f"{path.name}.{record.lineage}"))

    def _prune(self) -> None:
        present = self._present()
        best = self.best()
        for number in sorted(present)[: -self._keep]:
            if best is None or (best["lineage"], best["number"]) != (self._lineage, number):
                # Never half a checkpoint under its name.
                gone = present[number].with_name(f".{present[number].name}.removed")
                present[number].rename(gone)
                shutil.rmtree(gone)
