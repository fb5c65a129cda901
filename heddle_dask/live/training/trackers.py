"""Where metrics of a training may be reported to beside ``metrics.jsonl``.

Each library is imported when it is asked for. All of them write to files of this machine unless the user has configured
another place: nothing goes to a network by default.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from heddle_dask.core.errors import BadInput

PROJECT: Final = "heddle"


class Tracker(Protocol):
    """Takes the numbers of each step."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Report numbers by name."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoardTracker:
    """Event files in a folder, which ``tensorboard --logdir`` reads."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder / "tensorboard"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(self._event(step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases; offline unless ``WANDB_MODE`` says otherwise."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            project=PROJECT, name=folder.name, dir=str(folder), config=dict(description), resume="allow"
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A local project of trackio, in RUN_DIR/trackio unless ``TRACKIO_DIR`` says otherwise."""

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        import trackio

        self._trackio = trackio
        with contextlib.redirect_stdout(sys.stderr):  # stdout belongs to the result
            trackio.init(project=PROJECT, name=folder.name, config=dict(description), resume="allow", embed=False)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._trackio.log(dict(numbers), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


TRACKERS: Final[Mapping[str, Callable[[Path, Mapping[str, Any]], Tracker]]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}


def check_tracker(name: str) -> None:
    """Refuse a tracker that is unknown or not installed."""
    if name not in TRACKERS:
        raise BadInput(f"--report-to {name}: use {', '.join(TRACKERS)}")
    if find_spec(name) is None:
        raise BadInput(f"--report-to {name} needs the package {name}: install it with `pip install {name}`")


def tracked_numbers(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row of metrics, those of its mappings by names such as ``seconds/train``."""
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            numbers |= tracked_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{name}"] = float(value)
    return numbers
