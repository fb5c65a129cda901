"""A training batch as one file: NumPy's npz, exact, complete or absent.

Members of the file, all of them plain arrays (`numpy.load` reads them without this package):

- ``header``: JSON text, as one string: format number, step, lineage, and the groups with their members in order. A
  member has the lengths of its sequences.
- ``token_ids`` int32, ``trained`` bool, ``logprobs`` float32, ``temperatures`` float32, ``policy_versions`` int32,
  ``turns`` int32: the tokens of all sequences, one after another (`groups.TokenSequence`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from heddle_dask.core.errors import BadInput, WriteFailed, one_line_of
from heddle_dask.core.plain_files import open_plain
from heddle_dask.core.value_types import check_types
from heddle_dask.records.synced_store import sync_path
from heddle_dask.training.groups import TokenSequence, TrainingBatch, TrainingTrajectory, TrajectoryGroup

FORMAT = "heddle-batch"
FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d{6,})\.npz")
BATCHES = "batches"

TOKEN_COLUMNS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "trained": np.bool_,
    "logprobs": np.float32,
    "temperatures": np.float32,
    "policy_versions": np.int32,
    "turns": np.int32,
}
_LATER_COLUMN = "turns"
"""Files of earlier versions lack it; their members have no rewards of turns."""


@dataclass(frozen=True, slots=True)
class _StoredMember:
    """A member of a group, as the header has it."""

    trajectory_id: str
    reward: float
    first_version: int
    truncated: bool
    lengths: list[int]
    masked: bool = False
    turn_rewards: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _StoredGroup:
    group_id: str
    task_id: str
    environment: str
    lineage: str
    late_for: str
    earlier_rewards: list[float]
    members: list[_StoredMember]


@dataclass(frozen=True, slots=True)
class _StoredBatch:
    step: int
    lineage: str
    groups: list[_StoredGroup]


UNREADABLE = (
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


def batch_path(folder: Path, step: int) -> Path:
    """The file of the batch that optimiser step `step` takes: ``step-000012.npz``."""
    return folder / f"step-{step:06d}.npz"


def save_batch(batch: TrainingBatch, path: Path) -> None:
    """Write a batch; afterwards it is on disk, and at no moment is there half a file of this name.

    A file that is there is replaced. The folder is made where it is missing.

    Raises
    ------
    WriteFailed
    """
    sequences = [one for group in batch.groups for member in group.members for one in member.sequences]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(one, name) for one in sequences] or [np.empty(0, dtype)]).astype(
            dtype, copy=False
        )
        for name, dtype in TOKEN_COLUMNS.items()
    }
    aside = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as file:
            np.savez(file, header=np.array(json.dumps(_header(batch))), **columns)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise WriteFailed.of(path, error) from None


def check_not_packed(file: Any) -> None:
    """Refuse, by a ValueError, arrays that are compressed: a small file could unpack to any size."""
    if any(member.compress_type != zipfile.ZIP_STORED for member in file.zip.infolist()):
        raise ValueError("its parts are compressed")


def load_batch(path: Path) -> TrainingBatch:
    """Read what `save_batch` wrote, exactly.

    Raises
    ------
    BadInput
        There is no such file, it is no batch of this format, or it is damaged.
    """
    try:
        # Opened here: numpy leaves a damaged file open.
        with open_plain(path) as raw, np.load(raw, allow_pickle=False) as file:
            check_not_packed(file)
            header = json.loads(str(file["header"]))
            columns = {
                name: file[name].astype(dtype, copy=False)
                for name, dtype in TOKEN_COLUMNS.items()
                if name in file or name != _LATER_COLUMN
            }
            columns.setdefault(_LATER_COLUMN, np.where(columns["trained"], np.int32(0), np.int32(-1)))
        if header.pop("heddle") != FORMAT:
            raise ValueError("it is another kind of file")
        version = header.pop("format")
    except FileNotFoundError:
        raise BadInput(f"no batch at {path}: give a file of a run's batches (step-….npz)") from None
    except BadInput:
        raise
    except UNREADABLE as error:
        raise BadInput(f"cannot read the batch {path}: {one_line_of(error)}: restore it") from None
    if version != FORMAT_VERSION:
        raise BadInput(
            f"the batch {path} has format {version!r:.40}, this version of heddle reads {FORMAT_VERSION}: use the "
            "version that wrote it"
        )
    try:
        return _batch(header, columns)
    except BadInput:
        raise
    except UNREADABLE as error:
        raise BadInput(f"cannot read the batch {path}: {one_line_of(error)}: restore it") from None


def _header(batch: TrainingBatch) -> dict[str, Any]:
    return {
        "heddle": FORMAT,
        "format": FORMAT_VERSION,
        "step": batch.step,
        "lineage": batch.lineage,
        "groups": [_group_header(group) for group in batch.groups],
    }


def _group_header(group: TrajectoryGroup) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "task_id": group.task_id,
        "environment": group.environment,
        "lineage": group.lineage,
        "late_for": group.late_for,
        "earlier_rewards": list(group.earlier_rewards),
        "members": [
            {
                "trajectory_id": member.trajectory_id,
                "reward": member.reward,
                "first_version": member.first_version,
                "truncated": member.truncated,
                "lengths": [len(one) for one in member.sequences],
                "masked": member.masked,
                "turn_rewards": list(member.turn_rewards),
            }
            for member in group.members
        ],
    }


def _batch(header: dict[str, Any], columns: dict[str, npt.NDArray[Any]]) -> TrainingBatch:
    groups = [
        _StoredGroup(**{**group, "members": [_StoredMember(**each) for each in group["members"]]})
        for group in header["groups"]
    ]
    stored = _StoredBatch(**{**header, "groups": groups})
    check_types(stored)
    lengths = [n for group in stored.groups for member in group.members for n in member.lengths]
    if min(lengths, default=0) < 0 or any(column.shape != (sum(lengths),) for column in columns.values()):
        raise ValueError("its tokens are not those that it names")
    sequences = _sequences(columns, lengths)
    return TrainingBatch(stored.step, stored.lineage, tuple(_group(group, sequences) for group in stored.groups))


def _sequences(columns: dict[str, npt.NDArray[Any]], lengths: list[int]) -> Iterator[TokenSequence]:
    stop = 0
    for length in lengths:
        start, stop = stop, stop + length
        yield TokenSequence(**{name: column[start:stop] for name, column in columns.items()})


def _group(stored: _StoredGroup, sequences: Iterator[TokenSequence]) -> TrajectoryGroup:
    members = tuple(
        TrainingTrajectory(
            member.trajectory_id,
            member.reward,
            tuple(next(sequences) for _ in member.lengths),
            member.first_version,
            member.truncated,
            member.masked,
            tuple(member.turn_rewards),
        )
        for member in stored.members
    )
    return TrajectoryGroup(
        stored.group_id,
        stored.task_id,
        stored.environment,
        stored.lineage,
        members,
        stored.late_for,
        tuple(stored.earlier_rewards),
    )


def stored_steps(folder: Path) -> dict[int, Path]:
    """The batch files of a run's folder, or of its ``batches``, by step and in order.

    Raises
    ------
    BadInput
        There is no such folder, or it has none.
    """
    inside = folder / BATCHES if (folder / BATCHES).is_dir() else folder
    found = {int(match[1]): path for path in inside.glob("step-*.npz") if (match := _NAME.fullmatch(path.name))}
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
