"""The directory of a training: what was asked, what was measured, samples, batches, checkpoints, weights.

``run.json`` is written first and says what the directory is; everything else is found by its name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from heddle_dask.core.errors import BadInput, WriteFailed
from heddle_dask.core.plain_files import read_plain
from heddle_dask.core.value_types import check_types, read_from
from heddle_dask.training.json_lines import append_lines, read_lines, write_lines

DirectoryMode = Literal["create", "overwrite", "resume"]

FORMAT: Final = "heddle-training"
FORMAT_VERSION: Final = 1

FREE_TO_CHANGE: Final = ("steps", "engines", "learning", "cluster", "evaluation", "software")
"""Parts of the description that a resumed training may change."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of training, as ``run.json`` has it."""

    lineage: str
    number: int
    checkpoint: str = ""


@dataclass(frozen=True, slots=True)
class _Stored:
    asked: Mapping[str, Any]
    lineages: list[_Line]


class TrainingDirectory:
    """RUN_DIR and its parts.

    Attributes
    ----------
    run_file
        What was asked, and the lines of training (`lineages`).
    metrics, evaluations
        One JSON line for each training step, and for each evaluation.
    samples
        Some trajectories of each step as text, one JSON line each.
    rollout
        Zarr store of all trajectories; its journal is beside it.
    weights
        The default weight store.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.evaluations = path / "evaluations.jsonl"
        self.samples = path / "samples.jsonl"
        self.rollout = path / "rollout.zarr"
        self.batches = path / "batches"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"

    def is_training(self) -> bool:
        return self.run_file.is_file()

    def check(self, mode: DirectoryMode) -> None:
        """Refuse what `begin` would refuse, before anything starts; changes nothing."""
        if mode == "resume":
            self.description()
            return
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return
        if not self.is_training():
            raise BadInput(f"--out {self.path} exists and is no training: give another path, or remove it")
        if mode == "create":
            raise BadInput(f"--out {self.path} is a training: go on with it by --resume, or replace it by --overwrite")

    def begin(self, description: Mapping[str, Any], mode: DirectoryMode, lineage: str) -> dict[str, Any]:
        """Make or open the directory; returns what ``run.json`` says now.

        Parameters
        ----------
        description
            JSON-able: what was asked. A resumed training must ask for the same, but for `FREE_TO_CHANGE`.
        lineage
            Name of the line of training of a new one.

        Raises
        ------
        BadInput, WriteFailed
        """
        self.check(mode)
        if mode == "resume":
            stored = self.description()
            _check_same(self.path, stored["asked"], description)
            return stored
        if mode == "overwrite" and self.path.exists():
            shutil.rmtree(self.path)
        began = [{"lineage": lineage, "number": 0}]
        stored = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "asked": dict(description),
            "lineages": began,
        }
        self._write(stored)
        return stored

    def changes(self, description: Mapping[str, Any]) -> None:
        """From the next step on, a resumed training is what it asked for."""
        self._write({**self.description(), "asked": dict(description)})

    def description(self) -> dict[str, Any]:
        """What ``run.json`` says.

        Raises
        ------
        BadInput
            There is none, or it is of another kind.
        """
        try:
            stored: dict[str, Any] = json.loads(read_plain(self.run_file))
        except FileNotFoundError:
            raise BadInput(f"{self.path} is no training: it has no run.json") from None
        except (OSError, ValueError, RecursionError) as error:
            raise BadInput(f"{self.run_file} cannot be read: {error}") from None
        if not isinstance(stored, dict) or (stored.get("format"), stored.get("version")) != (FORMAT, FORMAT_VERSION):
            raise BadInput(f"{self.run_file} is of another kind or version: use the heddle that wrote it")
        with read_from(self.run_file):
            check_types(_Stored(stored["asked"], [_Line(**each) for each in stored["lineages"]]))
            stored["lineages"][0]
        return stored

    def lineage(self) -> tuple[str, str]:
        """The newest line of training, and the checkpoint that it goes on from (empty: the model)."""
        newest = self.description()["lineages"][-1]
        return str(newest["lineage"]), str(newest.get("checkpoint", ""))

    def begin_lineage(self, number: int, checkpoint: str = "") -> str:
        """A new line of training that goes on from weights `number` of the current one; returns its name.

        Parameters
        ----------
        checkpoint
            The directory that has these weights; empty: the model.
        """
        stored = self.description()
        lineages = stored["lineages"]
        first = str(lineages[0]["lineage"])
        name = f"{first}.{len(lineages) + 1}"
        lineages.append({"lineage": name, "number": number, "checkpoint": checkpoint})
        self._write(stored)
        return name

    def forget_after(self, number: int) -> None:
        """Take what was measured of later steps than `number` out of the logs: these steps are done again."""
        for path, key in ((self.metrics, "step"), (self.samples, "step"), (self.evaluations, "number")):
            rows = read_lines(path)
            with read_from(path):
                kept = [row for row in rows if row[key] <= number]
            # Also without a change: a torn last line goes.
            if path.exists():
                write_lines(path, kept)

    def add_metrics(self, row: Mapping[str, Any]) -> None:
        append_lines(self.metrics, [row])

    def add_evaluation(self, row: Mapping[str, Any]) -> None:
        append_lines(self.evaluations, [row])

    def _write(self, stored: Mapping[str, Any]) -> None:
        aside = self.run_file.with_name("run.json.partial")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with aside.open("w") as file:
                json.dump(stored, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.run_file)
        except OSError as error:
            raise WriteFailed.of(self.run_file, error) from None


_LATER: Mapping[str, Any] = {"truncated": "count"}
"""What directories do not have that are older than the option: they were trained so."""


def _check_same(path: Path, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    for name in sorted({*stored, *asked} - {*FREE_TO_CHANGE}):
        before, now = stored.get(name, _LATER.get(name)), json.loads(json.dumps(asked.get(name)))
        if before != now:
            raise BadInput(f"--resume {path}: {name} was {_short(before)}, and is {_short(now)} now: give the same")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
