"""Batches of random tokens for the shipped agent, as a trainer takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from heddle_dask.training.batch_files import batch_path, save_batch
from heddle_dask.training.groups import TokenSequence, TrainingBatch, TrainingTrajectory, TrajectoryGroup

AGENT = Path(__file__).parents[2] / "pipelines" / "tiny_agent" / "checkpoint"
VOCABULARY = 320


def token_sequence(rng: np.random.Generator, length: int, version: int = 0) -> TokenSequence:
    """A context, sampled tokens, an observation, and sampled tokens again."""
    trained = np.zeros(length, bool)
    trained[length // 4 : length // 2] = True
    trained[-(length // 4 + 1) :] = True
    return TokenSequence(
        rng.integers(0, VOCABULARY, length).astype(np.int32),
        trained,
        np.where(trained, -6 * rng.random(length), np.nan).astype(np.float32),
        np.where(trained, rng.choice([0.7, 1.0]), np.nan).astype(np.float32),
        np.where(trained, version, -1).astype(np.int32),
        np.where(trained, np.arange(length) >= length // 2, -1).astype(np.int32),
    )


def training_batch(step: int, lengths: Sequence[Sequence[int]], seed: int = 0, lineage: str = "a") -> TrainingBatch:
    """Groups of members with sequences of these lengths; the rewards of each group differ."""
    rng = np.random.default_rng([seed, step])
    groups = []
    for number, members in enumerate(lengths):
        rewards = rng.permutation(np.arange(len(members)) % 2).tolist()
        trajectories = tuple(
            TrainingTrajectory(f"{number}-{at}", float(reward), (token_sequence(rng, length, step - 1),), step - 1)
            for at, (length, reward) in enumerate(zip(members, rewards, strict=True))
        )
        groups.append(TrajectoryGroup(f"g{number}", f"t{number}", "math", lineage, trajectories))
    return TrainingBatch(step, lineage, tuple(groups))


def stored_batch(folder: Path, step: int, seed: int = 0, lineage: str = "a") -> Path:
    """A small batch in a file."""
    path = batch_path(folder, step)
    save_batch(training_batch(step, [[12, 30, 9], [17, 8, 25]], seed, lineage), path)
    return path
