"""Batches with the columns of verl's ``DataProto``, as NumPy's npz.

Checked with verl 0.9.1: ``verl_batch`` of `pipelines.any_trainer.verl_batches` makes the ``DataProto``. The columns are
those of its agent loop (``_postprocess``): ``prompts`` is padded on the left, ``responses`` on the right. A trajectory
of several branches is several rows, of which the first has the reward; ``advantages`` is right for all of them, so use
it in the place of verl's own estimate. verl divides by one temperature for the whole batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from heddle_dask.core.errors import BadInput, WriteFailed, one_line_of
from heddle_dask.core.plain_files import open_plain
from heddle_dask.training.batch_files import UNREADABLE, check_not_packed
from heddle_dask.training.sample_rows import SampleRow


def verl_columns(rows: Sequence[SampleRow], pad_token_id: int = 0) -> dict[str, npt.NDArray[Any]]:
    """The columns of one batch; numbers for ``batch``, texts (object arrays) for ``non_tensor_batch``.

    Raises
    ------
    BadInput
        There are no rows, or their tokens were sampled at several temperatures.
    """
    if not rows:
        raise BadInput("a batch without sequences: verl takes no empty batch")
    temperatures = np.unique(np.concatenate([row.temperatures[row.trained] for row in rows]))
    if len(temperatures) != 1:
        raise BadInput(
            f"tokens were sampled at {len(temperatures)} temperatures, from {temperatures[0]:g} to "
            f"{temperatures[-1]:g}: verl takes one; use another form"
        )
    cuts = [int(np.argmax(row.trained)) for row in rows]  # the response begins with the first sampled token
    prompt_width = max(cuts)
    width = max(len(row) - cut for row, cut in zip(rows, cuts, strict=True))
    shape = (len(rows), width)
    columns: dict[str, npt.NDArray[Any]] = {
        "prompts": np.full((len(rows), prompt_width), pad_token_id, np.int64),
        "responses": np.full(shape, pad_token_id, np.int64),
        "response_mask": np.zeros(shape, np.int64),
        "rollout_log_probs": np.zeros(shape, np.float32),
        "rm_scores": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
    }
    attention = np.zeros((len(rows), prompt_width + width), np.int64)
    for index, (row, cut) in enumerate(zip(rows, cuts, strict=True)):
        _fill(columns, index, row, cut)
        attention[index, prompt_width - cut : prompt_width + len(row) - cut] = 1
    return {
        **columns,
        "returns": columns["advantages"].copy(),
        "input_ids": np.concatenate([columns["prompts"], columns["responses"]], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(np.cumsum(attention, axis=1) - 1, 0),
        "temperature": np.full(len(rows), temperatures[0], np.float32),
        "uid": np.array([row.group_id for row in rows], object),
        "data_source": np.array([row.environment for row in rows], object),
        "trajectory_id": np.array([row.trajectory_id for row in rows], object),
    }


def write_verl_step(rows: Sequence[SampleRow], out: Path, step: int, pad_token_id: int = 0) -> None:
    """Write ``OUT/step-000001.npz``; texts are stored as text, so that no pickle is read.

    Raises
    ------
    BadInput
        As `verl_columns`, or the file exists.
    WriteFailed
    """
    path = out / f"step-{step:06d}.npz"
    columns = verl_columns(rows, pad_token_id)
    aside = path.with_name(f"{path.name}.partial")
    try:
        out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise BadInput(f"{path} exists: choose another folder")
        with open(aside, "wb") as file:
            stored: dict[str, Any] = {
                name: column.astype(str) if column.dtype == object else column for name, column in columns.items()
            }
            np.savez(file, **stored)
        os.replace(aside, path)
    except OSError as error:
        raise WriteFailed.of(path, error) from None


def read_verl_step(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read what `write_verl_step` wrote: the same columns.

    Raises
    ------
    BadInput
    """
    try:
        with open_plain(path) as raw, np.load(raw, allow_pickle=False) as file:
            check_not_packed(file)
            return {
                name: file[name].astype(object) if file[name].dtype.kind == "U" else file[name] for name in file.files
            }
    except UNREADABLE as error:
        raise BadInput(f"cannot read {path}: {one_line_of(error)}: export it again") from None


def _fill(columns: dict[str, npt.NDArray[Any]], index: int, row: SampleRow, cut: int) -> None:
    length = len(row) - cut
    trained = row.trained[cut:]
    columns["prompts"][index, columns["prompts"].shape[1] - cut :] = row.token_ids[:cut]
    columns["responses"][index, :length] = row.token_ids[cut:]
    columns["response_mask"][index, :length] = trained
    columns["rollout_log_probs"][index, :length][trained] = row.logprobs[cut:][trained]
    columns["advantages"][index, :length] = row.token_advantages[cut:]
    if row.first_of_trajectory:
        columns["rm_scores"][index, length - 1] = row.reward
