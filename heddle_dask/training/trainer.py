"""The border between the training loop and a trainer, which runs in processes of its own.

The trainer reads a batch from a file, does one or more optimiser steps, and publishes weights; now and then it writes a
checkpoint. It knows neither engines nor Dask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        The newest checkpoint on disk: of these weights, or of older ones; None before the first one.
    kept_from
        Optimiser steps of the oldest checkpoint: no restart needs the batches up to it.
    """

    version: PolicyVersion
    checkpoint: Path | None = None
    kept_from: int = 0


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
        By phase: ``load``, ``prox`` (logprobs before the first optimiser step), ``train``, and ``checkpoint`` (what of
        one the step waited for).
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
        """Train on a stored batch; afterwards its weights are `version`.

        A trainer whose weights are `version` already returns without training: the loop may ask again after a crash.
        One that has come back with older weights first trains the batches between them, which lie in the same folder.
        """
        ...

    async def publish(
        self, version: PolicyVersion, store: str, copied: Callable[[], None] = ..., *, evaluated: bool = False
    ) -> str | None:
        """Write its weights, which are `version`, into the weight store; returns the URI of the manifest.

        None: it has died meanwhile, and has newer weights now.

        Parameters
        ----------
        copied
            Called when it has a copy of them, so that it may train on; one that never calls it trains on afterwards.
        evaluated
            They will be evaluated, and `keep_best` may name them.
        """
        ...

    async def keep_best(self, version: PolicyVersion, reward: float) -> None:
        """The weights of `version` are the best ones by held-out reward: they are kept until better ones are named."""
        ...

    async def save(self, version: PolicyVersion) -> TrainerState:
        """Write a checkpoint of its weights, which are `version`, and a model directory, unless they are there.

        Then they are on disk. A trainer that has come back with older weights first trains the batches between them.
        """
        ...

    async def close(self) -> None:
        """End its processes."""
        ...
