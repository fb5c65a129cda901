"""Ranks of a trainer without orders: each loads its shard and trains on batches; the first keeps what came of it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from worlds.training_batches import training_batch

from heddle_dask.training.advantages import less_mean_over_std
from heddle_dask.training.trainer_spec import TrainerSpec
from pipelines.grpo.batch_step import BatchStep
from pipelines.grpo.losses import decoupled_clipped_loss
from pipelines.grpo.policy import Policy
from pipelines.grpo.ranks import join, prepare_process
from pipelines.grpo.sequences import trained_sequences

LENGTHS = [[40, 61, 33], [57, 28, 49]]


def train(spec: TrainerSpec, rank: int) -> dict[str, Any]:
    """Two batches; what was read, is held, was allocated in the second step, and the weights and metrics after them."""
    with bytes_read() as read:
        policy = Policy(spec, torch.device("cpu"))
    optimizer = torch.optim.AdamW(policy.trained, lr=1e-3, eps=1e-3)
    metrics: dict[str, float] = {}
    allocated = 0
    for number in (1, 2):
        batch = trained_sequences(training_batch(number, LENGTHS), less_mean_over_std, policy.vocabulary, 4096)
        step = BatchStep(policy, optimizer, decoupled_clipped_loss, None, rank, number - 1)
        allocated = most_allocated(lambda step=step, batch=batch: metrics.update(step.run(batch)[0]))
    moments = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    held = [*policy.model.parameters(), *moments]
    return {
        "read": read[0],
        "allocated": allocated,
        "held": sum(local(each).nbytes for each in held),
        "weights": [whole(weight) for weight in policy.trained],
        "metrics": metrics,
    }


def local(tensor: Any) -> torch.Tensor:
    """This rank's part."""
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()


def whole(tensor: Any) -> torch.Tensor:
    """All parts; all ranks ask."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Count what is read of files of weights."""
    counted = [0]
    reads = HuggingFaceStorageReader._process_read_request

    def count(reader: Any, file: Any, request: Any, planner: Any) -> None:
        counted[0] += math.prod(request.lengths) * reader.storage_data[request.storage_index].dtype.itemsize
        reads(reader, file, request, planner)

    HuggingFaceStorageReader._process_read_request = count  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        HuggingFaceStorageReader._process_read_request = reads  # type: ignore[method-assign]


def follow(rank: int, specs: Sequence[TrainerSpec], folder: str) -> None:
    """One rank, in a process of its own."""
    prepare_process(specs[0])
    join(specs[0], rank, Path(folder, "meeting"))
    torch.save([train(spec, rank) for spec in specs], Path(folder, f"rank-{rank}.pt"))


def most_allocated(run: Callable[[], object]) -> int:
    """The most bytes of tensors that exist at a time, beyond those that were there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    return max(accumulate(sizes))
