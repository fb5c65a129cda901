"""The stream of samples as a PyTorch ``IterableDataset``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from heddle_dask.core.errors import BadInput
from heddle_dask.training.advantages import AdvantageFunction, less_mean
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.sample_rows import SampleRow, sample_rows

IGNORED_LABEL = -100
"""Label of a token that is not trained; PyTorch's cross entropy leaves it out."""


class SampleDataset(IterableDataset[dict[str, Any]]):
    """One dictionary of padded tensors for each training batch; use it with ``DataLoader(…, batch_size=None)``.

    Parameters
    ----------
    batches
        Called at each iteration: `training.batch_stream.stored_batches`, or the batches of an
        `training.iterated_trainer.IteratedTrainer`.
    pad_token_id
        Fills the ends of shorter sequences.

    Raises
    ------
    BadInput
        While iterating, in several workers of a ``DataLoader``: each of them would read all batches.
    """

    def __init__(
        self,
        batches: Callable[[], Iterable[TrainingBatch]],
        pad_token_id: int = 0,
        advantages: AdvantageFunction = less_mean,
    ) -> None:
        self._batches = batches
        self._pad_token_id = pad_token_id
        self._advantages = advantages

    def __iter__(self) -> Iterator[dict[str, Any]]:
        workers = get_worker_info()
        if workers is not None and workers.num_workers > 1:
            raise BadInput(f"num_workers is {workers.num_workers}: use 0 or 1, for every batch is read once")
        for batch in self._batches():
            rows = list(sample_rows(batch, self._advantages))
            yield {"step": batch.step, **padded_tensors(rows, self._pad_token_id)}


def padded_tensors(rows: Sequence[SampleRow], pad_token_id: int = 0) -> dict[str, Any]:
    """The rows of a batch as tensors of [sequences, longest sequence].

    Returns
    -------
    dict
        ``input_ids``, ``attention_mask``, ``policy_versions`` int64; ``trained`` bool; ``labels`` int64, the token
        where it is trained and `IGNORED_LABEL` elsewhere; ``logprobs``, ``temperatures`` float32, nan where not
        trained; ``token_advantages`` float32, 0 where not trained; ``advantages``, ``rewards`` float32 and
        ``staleness`` int64 of [sequences]; ``group_ids``, ``trajectory_ids``, ``environments``, lists of text.
    """
    longest = max((len(row) for row in rows), default=0)
    shape = (len(rows), longest)
    columns: dict[str, torch.Tensor] = {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "trained": torch.zeros(shape, dtype=torch.bool),
        "logprobs": torch.full(shape, math.nan, dtype=torch.float32),
        "temperatures": torch.full(shape, math.nan, dtype=torch.float32),
        "policy_versions": torch.full(shape, -1, dtype=torch.int64),
        "token_advantages": torch.zeros(shape, dtype=torch.float32),
    }
    for index, row in enumerate(rows):
        length = len(row)
        columns["input_ids"][index, :length] = torch.from_numpy(row.token_ids)
        columns["attention_mask"][index, :length] = 1
        for name in ("trained", "logprobs", "temperatures", "policy_versions", "token_advantages"):
            columns[name][index, :length] = torch.from_numpy(getattr(row, name))
    return {
        **columns,
        "labels": torch.where(columns["trained"], columns["input_ids"], IGNORED_LABEL),
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32),
        "rewards": torch.tensor([row.reward for row in rows], dtype=torch.float32),
        "staleness": torch.tensor([row.staleness for row in rows], dtype=torch.int64),
        "group_ids": [row.group_id for row in rows],
        "trajectory_ids": [row.trajectory_id for row in rows],
        "environments": [row.environment for row in rows],
    }
