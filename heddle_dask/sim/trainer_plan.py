"""How many GPUs the trainer of a training can have: what each number needs in memory, and how long a step takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.gpu_split import NODES_APART
from heddle_dask.cost.hardware import MEMORY_SHARE, Gpu
from heddle_dask.cost.training_memory import (
    TrainedModel,
    TrainerBytes,
    TrainerSetup,
    most_pass_tokens,
    train_step_s,
    trainer_bytes,
)
from heddle_dask.workloads.planned import PlannedTrajectory

TRIED_RANK = 32
"""Of the adapter that is proposed where all weights do not fit."""


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """Tokens of the sequences of a training batch, and the sum of their squared lengths."""

    tokens: float
    squared: float

    @classmethod
    def of(cls, drawn: Sequence[PlannedTrajectory], trajectories: int) -> BatchTokens:
        """As many trajectories as in a batch, each like the mean of those drawn."""
        each = trajectories / len(drawn)
        lengths = [one.context_tokens for one in drawn]
        return cls(each * sum(lengths), each * sum(length**2 for length in lengths))


@dataclass(frozen=True, slots=True)
class TrainerOnGpus:
    """A trainer on a number of GPUs.

    Attributes
    ----------
    most_pass_tokens
        The longest pass for which there is room.
    """

    gpus: int
    needs: TrainerBytes
    step_s: float
    most_pass_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """What is trained, and on which GPUs.

    Attributes
    ----------
    setup
        Its ranks are replaced by each number of GPUs that is tried.
    gpus
        Of trainer and engines together.
    """

    name: str
    model: TrainedModel
    setup: TrainerSetup
    gpu: Gpu
    gpus: int
    gpus_per_node: int

    @property
    def shares(self) -> bool:
        """The trainer and an engine have the same, only GPU."""
        return self.gpus == 1

    def with_ranks(self, ranks: int) -> TrainerSetup:
        return replace(self.setup, ranks=ranks)

    def fitting(self) -> list[int]:
        """The numbers of GPUs on which the trainer has room; it is within a node, and leaves the engines one GPU.

        Of four nodes and more it has a whole one.

        Raises
        ------
        BadInput
            There is none. Says what each GPU lacks, and what would help.
        """
        most = 1 if self.shares else min(self.gpus - 1, self.gpus_per_node)
        least = most if self.gpus >= NODES_APART * self.gpus_per_node else 1
        found = [n for n in range(least, most + 1) if self._fits(self.with_ranks(n))]
        if found:
            return found
        needs = trainer_bytes(self.model, self.with_ranks(most)).needed_memory_bytes
        raise BadInput(
            f"training {self.name} ({_what(self.setup)}) needs {needs / 1e9:.0f} GB on each of {most} "
            f"GPU{'s' * (most > 1)} of {self.gpu.memory_bytes / 1e9:.0f} GB: {', or '.join(self._cures(most))}"
        )

    def rollout_gpus(self, trainer: Iterable[int]) -> list[int]:
        """Numbers of GPUs at which the rollout is simulated: the least, the most and the powers of two between."""
        if self.shares:
            return [1]
        counts = [self.gpus - n for n in trainer]
        least, most = min(counts), max(counts)
        return sorted({least, most, *(2**k for k in range(most.bit_length()) if least < 2**k < most)})

    def on(self, ranks: int, batch: BatchTokens) -> TrainerOnGpus:
        setup = self.with_ranks(ranks)
        return TrainerOnGpus(
            ranks,
            trainer_bytes(self.model, setup),
            train_step_s(self.model, setup, self.gpu, batch.tokens, batch.squared),
            most_pass_tokens(self.model, setup, self.gpu.memory_bytes),
        )

    def engine_memory_share(self) -> float:
        """Share of a GPU's memory that is left for its engine, in whole hundredths."""
        if not self.shares:
            return MEMORY_SHARE
        needs = trainer_bytes(self.model, self.with_ranks(1)).needed_memory_bytes
        return min(MEMORY_SHARE, int(100 * (1 - needs / self.gpu.memory_bytes)) / 100)

    def savings(self, ranks: int) -> Mapping[str, float]:
        """Bytes on each GPU that a change would save, the largest first."""
        now = trainer_bytes(self.model, self.with_ranks(ranks)).total
        half = self.setup.pass_tokens // 2
        tried = {f"passes of {half:,} tokens": replace(self.with_ranks(ranks), pass_tokens=half)}
        if not self.shares and ranks < self.gpus_per_node:
            tried["one GPU more for the trainer"] = self.with_ranks(ranks + 1)
        if not self.setup.lora_rank:
            tried[f"--lora {TRIED_RANK}"] = replace(self.with_ranks(ranks), lora_rank=TRIED_RANK)
        saved = {name: now - trainer_bytes(self.model, setup).total for name, setup in tried.items()}
        return dict(sorted(saved.items(), key=lambda pair: -pair[1]))

    def _fits(self, setup: TrainerSetup) -> bool:
        return trainer_bytes(self.model, setup).needed_memory_bytes <= self.gpu.memory_bytes

    def _cures(self, ranks: int) -> list[str]:
        cures = []
        if most := most_pass_tokens(self.model, self.with_ranks(ranks), self.gpu.memory_bytes):
            cures.append(f"use passes of at most {most:,} tokens (--max-context-tokens, --trainer micro_batch_tokens)")
        adapter = replace(self.with_ranks(ranks), lora_rank=TRIED_RANK)
        if not self.setup.lora_rank and self._fits(adapter):
            needs = trainer_bytes(self.model, adapter).needed_memory_bytes
            cures.append(f"--lora {TRIED_RANK} ({needs / 1e9:.0f} GB)")
        more = [n for n in range(ranks + 1, self.gpus_per_node + 1) if self._fits(self.with_ranks(n))]
        if more:
            cures.append(f"{more[0]} GPUs for the trainer")
        return cures or ["use a smaller model"]


def _what(setup: TrainerSetup) -> str:
    weights = f"LoRA {setup.lora_rank}" if setup.lora_rank else "all weights"
    return f"{weights}, passes of {setup.pass_tokens:,} tokens"
