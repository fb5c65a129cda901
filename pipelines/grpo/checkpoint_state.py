"""The state of a trainer in shards: what each rank holds of weights and optimiser, and of its random generators.

A checkpoint has it in the format of `torch.distributed.checkpoint`: each rank writes what it holds, and reads, also as
one of another number of ranks, what it will hold.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from heddle_dask.core.errors import BadInput
from pipelines.grpo.policy import Policy

# torch wraps what a rank failed of into an error that is no Exception.
FAILURES = (Exception, CheckpointException)


class ShardedState:
    """What one rank holds.

    Parameters
    ----------
    rank
        All ranks save and load together.
    """

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._random = f"random.{rank}"
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        # Its own: what is written in the background must not meet what the ranks do meanwhile.
        self._group = dist.new_group(backend="gloo")

    def save(self, directory: Path) -> Future[Any]:
        """Copy what this rank holds to the host's memory, and begin to write it; the answer comes when all have."""
        state = {**self._tensors(), self._random: _as_tensor(random_state())}
        return async_save(state, checkpoint_id=directory, process_group=self._group)  # type: ignore[return-value]

    def load(self, directory: Path) -> None:
        """Take the weights, the optimiser's state and, where this rank had one, the random state of a checkpoint.

        Raises
        ------
        BadInput
            It cannot be read, or is that of other weights.
        """
        _make_state(self._optimizer)
        state = self._tensors()
        try:
            stored = FileSystemReader(directory).read_metadata().state_dict_metadata
            if self._random in stored:
                state[self._random] = torch.empty(stored[self._random].size, dtype=torch.uint8)  # type: ignore[union-attr]
            load(state, checkpoint_id=directory, process_group=self._group)
        except FAILURES as error:
            raise BadInput(f"the trainer state of checkpoint {directory} cannot be read: {last_line(error)}") from None
        if self._random in state:
            restore_random_state(torch.load(io.BytesIO(state[self._random].numpy().tobytes()), weights_only=True))

    def _tensors(self) -> dict[str, torch.Tensor]:
        """By name; they share their memory with weights and optimiser."""
        tensors = {f"weights.{name}": tensor for name, tensor in self._policy.weights().items()}
        for name, weight in self._policy.model.named_parameters():
            for key, value in self._optimizer.state.get(weight, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        return tensors


def last_line(error: BaseException) -> str:
    """What an error of `FAILURES` says in the end."""
    return str(error).strip().splitlines()[-1][:200] if str(error).strip() else type(error).__name__


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimiser make its state, by a step that changes no weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _as_tensor(value: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def random_state() -> dict[str, Any]:
    """The states of all random generators of this process, as plain values and tensors."""
    version, words, gauss = random.getstate()
    drawn: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = drawn
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
