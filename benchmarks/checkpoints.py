"""What checkpoints and publications cost: bytes per parameter, measured on a small model, and shares of a step at 7B.

A step waits for copies only: of the weights that are published, gathered on the first rank, and, when a checkpoint is
due, of each rank's shard. The disk takes both while the next steps run. With N parameters, R ranks, p and c bytes per
parameter of a publication and a checkpoint, copies of m bytes/s, a disk of d bytes/s, steps of s seconds and
checkpoints every t seconds:

    waited share = (p N + c N / R * s / t) / m / s
    disk share   = (p N + c N * s / t) / d / s

Both stand in the row; together they are what storing could cost if nothing ran beside anything.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.tables import Column, print_measured_rows
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.batch_files import batch_path, save_batch
from heddle_dask.training.groups import TokenSequence, TrainingBatch, TrainingTrajectory, TrajectoryGroup
from heddle_dask.training.trainer_spec import TrainerSpec

_LINEAGE = "bench"
_VOCABULARY = 8000


@dataclass(frozen=True, slots=True)
class StoringRow:
    """Measured on a bfloat16 model of `measured_parameters`, computed for one of `parameters`.

    Attributes
    ----------
    published_bytes, checkpoint_bytes
        Per parameter, as files.
    copied_s, begin_s, written_s
        Measured, on this machine's CPU: a copy of the small model's weights; what the step waited for its checkpoint,
        and until that was complete.
    copy_bytes_per_s
        Assumed: from a GPU into the host's pageable memory.
    waited_share, disk_share
        Of a step, by the formulas of this file.
    """

    measured_parameters: int
    published_bytes: float
    checkpoint_bytes: float
    copied_s: float
    begin_s: float
    written_s: float
    parameters: int
    ranks: int
    step_s: float
    every_s: float
    disk_bytes_per_s: float
    copy_bytes_per_s: float
    waited_share: float
    disk_share: float


def measure_storing(
    parameters: int, ranks: int, step_s: float, every_s: float, disk_bytes_per_s: float, copies: float, layers: int
) -> StoringRow:
    """Train one step of a small model, publish it, write a checkpoint, and count bytes."""
    from pipelines.grpo.ranks import Ranks

    with tempfile.TemporaryDirectory(prefix="heddle-bench-storing-") as name:
        folder = Path(name)
        model = _small_model(folder / "model", layers)
        trainer = Ranks(TrainerSpec(model, str(folder / "checkpoints"), _LINEAGE, checkpoint_every_s=1e9), folder / "m")
        version = PolicyVersion(_LINEAGE, 1)
        trainer.train(_small_batch(folder / "batches"), version)
        count = sum(weight.numel() for weight in trainer.learner.policy.trained)
        began_s = time.perf_counter()
        copied = trainer.weights_of(version)
        copied_s = time.perf_counter() - began_s
        assert copied is not None
        trainer.learner.publisher.publish(copied.weights, version, str(folder / "store"))
        began_s = time.perf_counter()
        checkpoint = trainer.save(model=False).checkpoint
        written_s = time.perf_counter() - began_s
        assert checkpoint is not None
        published, stored = _bytes_in(folder / "store") / count, _bytes_in(checkpoint) / count
        often = step_s / every_s
        return StoringRow(
            measured_parameters=count,
            published_bytes=published,
            checkpoint_bytes=stored,
            copied_s=copied_s,
            begin_s=trainer.learner.record.seconds["checkpoint"],
            written_s=written_s,
            parameters=parameters,
            ranks=ranks,
            step_s=step_s,
            every_s=every_s,
            disk_bytes_per_s=disk_bytes_per_s,
            copy_bytes_per_s=copies,
            waited_share=parameters * (published + stored / ranks * often) / copies / step_s,
            disk_share=parameters * (published + stored * often) / disk_bytes_per_s / step_s,
        )


def _small_model(directory: Path, layers: int) -> str:
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from pipelines import tiny_agent

    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    config = Qwen3Config(vocab_size=_VOCABULARY, **sizes, **heads)
    made: Any = Qwen3ForCausalLM(config)
    made.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(Path(tiny_agent.__file__).with_name("checkpoint")).save_pretrained(directory)
    return str(directory)


def _small_batch(folder: Path) -> Path:
    rng, length = np.random.default_rng(0), 16
    members = tuple(
        TrainingTrajectory(
            f"t{reward}",
            float(reward),
            (
                TokenSequence(
                    rng.integers(0, _VOCABULARY, length).astype(np.int32),
                    np.arange(length) > 4,
                    np.where(np.arange(length) > 4, -9.0, np.nan).astype(np.float32),
                    np.where(np.arange(length) > 4, 1.0, np.nan).astype(np.float32),
                    np.where(np.arange(length) > 4, 0, -1).astype(np.int32),
                    np.where(np.arange(length) > 4, 0, -1).astype(np.int32),
                ),
            ),
            0,
        )
        for reward in (0, 1)
    )
    group = TrajectoryGroup("g", "t", "bench", _LINEAGE, members)
    save_batch(TrainingBatch(1, _LINEAGE, (group,)), batch_path(folder, 1))
    return batch_path(folder, 1)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


COLUMNS: tuple[Column, ...] = (
    ("published B/parameter", lambda row: f"{row.published_bytes:.2f}"),
    ("checkpoint B/parameter", lambda row: f"{row.checkpoint_bytes:.2f}"),
    ("parameters", lambda row: f"{row.parameters / 1e9:.1f}e9"),
    ("step s", lambda row: f"{row.step_s:g}"),
    ("waited", lambda row: f"{100 * row.waited_share:.1f} %"),
    ("disk", lambda row: f"{100 * row.disk_share:.1f} %"),
)


@click.command
@click.option("--parameters", default=7.6e9, show_default=True, help="Of the model that is computed for.")
@click.option("--ranks", default=8, show_default=True, help="Over which its state is sharded.")
@click.option("--step-s", default=366.0, show_default=True, help="Seconds of a training step.")
@click.option("--every-s", default=1800.0, show_default=True, help="Seconds between two checkpoints.")
@click.option("--disk", default=2e9, show_default=True, help="Bytes that the disk writes in a second.")
@click.option("--copies", default=5e9, show_default=True, help="Bytes that are copied in a second.")
@click.option("--layers", default=8, show_default=True, help="Of the small model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON line.")
def checkpoints(
    parameters: float,
    ranks: int,
    step_s: float,
    every_s: float,
    disk: float,
    copies: float,
    layers: int,
    as_json: bool,
) -> None:
    """Bytes that checkpoints and publications write, and their share of a step."""
    row = measure_storing(int(parameters), ranks, step_s, every_s, disk, copies, layers)
    print_measured_rows([row], COLUMNS, as_json=as_json)
