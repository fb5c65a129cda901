"""Micro batches as prime-rl reads them from a file system.

``OUT/rollouts/step_N/rank_R.bin`` is a list of ``MicroBatch`` in MessagePack: the input of its
``FileSystemMicroBatchReceiver`` (checked with prime-rl 559b447 of 2026-08-21, ``transports/rollouts``). Its structs are
arrays: fields by position, and those after the last one given have their defaults. Every token has the temperature
that it was sampled with. prime-rl counts steps from 0, this package from 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from heddle_dask.core.errors import BadInput, WriteFailed, check_count
from heddle_dask.training.sample_rows import SampleRow

_NEUTRAL_LOGPROB = 0.0
_NEUTRAL_TEMPERATURE = 1.0


def write_prime_rl_step(rows: Sequence[SampleRow], out: Path, step: int, ranks: int = 1) -> None:
    """Write the micro batches of one optimiser step, one sequence each, for `ranks` data-parallel ranks.

    All ranks get the same number of micro batches: where sequences are missing, one is repeated without anything to
    train.

    Raises
    ------
    BadInput
        There are no rows, or a step is there already.
    WriteFailed
    """
    check_count("ranks", ranks)
    if not rows:
        raise BadInput(f"step {step} has no sequence: prime-rl takes no empty step")
    micro_batches = [_micro_batch(row) for row in rows]
    micro_batches += [_idle(micro_batches[0])] * (-len(micro_batches) % ranks)
    folder = out / "rollouts" / f"step_{step - 1}"
    try:
        folder.mkdir(parents=True)
        for rank in range(ranks):
            aside = folder / f"rank_{rank}.bin.tmp"
            aside.write_bytes(msgpack.packb(micro_batches[rank::ranks]))
            os.replace(aside, folder / f"rank_{rank}.bin")
    except FileExistsError:
        raise BadInput(f"{folder} exists: choose another folder") from None
    except OSError as error:
        raise WriteFailed.of(folder, error) from None


def _micro_batch(row: SampleRow) -> list[Any]:
    """The required fields of a ``MicroBatch``, in their order."""
    length = len(row)
    return [
        row.token_ids.tolist(),  # input_ids
        row.trained.tolist(),  # loss_mask
        row.token_advantages.tolist(),  # advantages
        [p if trained else _NEUTRAL_LOGPROB for p, trained in _pairs(row.logprobs, row)],  # inference_logprobs
        list(range(length)),  # position_ids
        [length],  # sequence_lengths
        [t if trained else _NEUTRAL_TEMPERATURE for t, trained in _pairs(row.temperatures, row)],  # temperatures
        [row.environment] * length,  # env_names
        [length],  # seq_lens
    ]


def _idle(micro_batch: list[Any]) -> list[Any]:
    length = len(micro_batch[0])
    return [micro_batch[0], [False] * length, [0.0] * length, *micro_batch[3:]]


def _pairs(values: Any, row: SampleRow) -> zip[tuple[float, bool]]:
    return zip(values.tolist(), row.trained.tolist(), strict=True)
