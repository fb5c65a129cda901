"""The stored batches of a run, as an iterator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.training.batch_files import load_batch
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.stored_samples import BATCHES

_NAME = re.compile(r"step-(\d{6,})\.npz")


def stored_steps(folder: Path) -> dict[int, Path]:
    """The batch files of a run's folder, or of its ``batches``, by step and in order.

    Raises
    ------
    BadInput
        There is no such folder, or it has none.
    """
    inside = folder / BATCHES if (folder / BATCHES).is_dir() else folder
    found = {
        int(match[1]): path for path in inside.glob("step-*.npz") if (match := _NAME.fullmatch(path.name))
    }
    if not found:
        raise BadInput(f"no batches in {inside}: give the folder of a training run")
    return dict(sorted(found.items()))


def stored_batches(folder: Path, first_step: int = 1) -> Iterator[TrainingBatch]:
    """The batches that are stored now, in the order of their steps.

    Raises
    ------
    BadInput
        As `stored_steps`, or a file is damaged.
    """
    for step, path in stored_steps(folder).items():
        if step >= first_step:
            yield load_batch(path)
