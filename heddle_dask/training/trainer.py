"""The border between the training loop and a trainer, which runs in processes of its own.

The trainer reads a batch from a file, does one or more optimiser steps, writes a checkpoint, and publishes weights. It
knows neither engines nor Dask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from heddle_dask.core.ids import PolicyVersion


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Where a trainer stands.

    Attributes
    ----------
    version
        Lineage and number of the optimiser steps that its weights contain.
    checkpoint
        The checkpoint on disk that has exactly these weights; None before the first one.
    """

    version: PolicyVersion
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True)
class TrainReport:
    """One training step.

    Attributes
    ----------
    metrics
        By name: ``loss``, ``grad_norm``, ``entropy``, ``importance_weight_mean``, ``importance_weight_max``,
        ``logprob_difference_mean``, ``logprob_difference_max``, ``clip_fraction`` (several optimiser steps only),
        ``kl`` (where asked for), ``tokens``, ``learning_rate``. docs/trainer.md lists all.
    seconds
        By phase: ``load``, ``prox`` (logprobs before the first optimiser step), ``train``, ``checkpoint``.
    """

    state: TrainerState
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


class Trainer(Protocol):
    """A trainer as the loop sees it."""

    async def state(self) -> TrainerState:
        """Where it stands: after a restart, what its newest checkpoint says."""
        ...

    async def train(self, batch: Path, version: PolicyVersion) -> TrainReport:
        """Train on a stored batch; afterwards its weights are `version`, and a checkpoint is on disk.

        A trainer whose weights are `version` already returns without training: the loop may ask again after a crash.
        """
        ...

    async def publish(self, version: PolicyVersion, store: str) -> str:
        """Write its weights, which are `version`, into the weight store; returns the URI of the manifest."""
        ...

    async def keep_best(self, version: PolicyVersion, reward: float) -> None:
        """The checkpoint of `version` is the best one by held-out reward: it is kept while no better one is named."""
        ...

    async def close(self) -> None:
        """End its processes."""
        ...
