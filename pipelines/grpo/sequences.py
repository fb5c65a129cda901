"""From a batch to sequences with an advantage, and from sequences to micro-batches of ranks."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from heddle_dask.core.errors import BadInput
from heddle_dask.training.advantages import AdvantageFunction, is_known, token_advantages
from heddle_dask.training.groups import TokenSequence, TrainingBatch

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, eq=False)
class TrainedSequence:
    """One branch of a trajectory, cut behind its last trained token.

    Attributes
    ----------
    number
        Unique in the batch.
    trajectory
        Number of its trajectory in the batch: branches of one have the same.
    targets
        Positions in `token_ids` of the trained tokens, ascending and at least 1. The arrays that follow have one entry
        for each.
    """

    number: int
    trajectory: int
    token_ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    advantages: npt.NDArray[np.float32]
    logprobs: npt.NDArray[np.float32]
    temperatures: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]

    @property
    def length(self) -> int:
        """Tokens that the model reads: the last one is only predicted."""
        return len(self.token_ids) - 1


def trained_sequences(
    batch: TrainingBatch, advantages: AdvantageFunction, vocabulary: int, longest: int
) -> list[TrainedSequence]:
    """All sequences of a batch in which something is trained.

    Parameters
    ----------
    vocabulary
        Token ids are below this.
    longest
        Most tokens that the model takes.
    """
    found: list[TrainedSequence] = []
    trajectory = 0
    for group in batch.groups:
        for member, advantage in zip(group.members, advantages(group), strict=True):
            for sequence in member.sequences:
                where = f"trajectory {member.trajectory_id} of batch {batch.step}"
                _check(where, sequence, vocabulary, longest)
                if sequence.trained.any() and not member.masked and is_known(advantage):
                    at_tokens = token_advantages(advantage, sequence)
                    found.append(_cut(len(found), trajectory, at_tokens, sequence))
            trajectory += 1
    if not found:
        raise BadInput(f"batch {batch.step} has no sampled token with a known advantage: nothing can be trained")
    return found


def _cut(number: int, trajectory: int, advantages: npt.NDArray[np.float64], sequence: TokenSequence) -> TrainedSequence:
    targets = np.flatnonzero(sequence.trained)
    return TrainedSequence(
        number,
        trajectory,
        sequence.token_ids[: targets[-1] + 1].astype(np.int64),
        targets.astype(np.int64),
        advantages[targets].astype(np.float32),
        sequence.logprobs[targets],
        sequence.temperatures[targets],
        sequence.policy_versions[targets],
    )


def _check(where: str, sequence: TokenSequence, vocabulary: int, longest: int) -> None:
    ids, trained = sequence.token_ids, sequence.trained
    if len(ids) > longest:
        raise BadInput(f"{where} has {len(ids)} tokens: the model takes {longest}")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise BadInput(f"{where} has token ids outside of 0 to {vocabulary - 1}: it is of another tokenizer")
    if not trained.any():
        return
    if trained[0]:
        raise BadInput(f"{where} begins with a sampled token: nothing predicts it")
    if not np.isfinite(sequence.logprobs[trained]).all():
        raise BadInput(f"{where} has sampled tokens without a logprob: its engine must return them")
    temperatures = sequence.temperatures[trained]
    if not (np.isfinite(temperatures).all() and (temperatures > 0).all()):
        raise BadInput(f"{where} has sampled tokens without a temperature above 0: it cannot be trained on")


def parts_of(sequences: Sequence[TrainedSequence], parts: int, seed: str) -> list[list[TrainedSequence]]:
    """Split by trajectories, at random, into parts of like numbers of tokens; empty parts are left out."""
    by_trajectory: dict[int, list[TrainedSequence]] = {}
    for sequence in sequences:
        by_trajectory.setdefault(sequence.trajectory, []).append(sequence)
    whole = list(by_trajectory.values())
    if parts > 1:
        random.Random(seed).shuffle(whole)
    return [[one for trajectory in part for one in trajectory] for part in _even(whole, _tokens, parts) if part]


def shares_of(sequences: Sequence[TrainedSequence], ranks: int) -> list[list[TrainedSequence]]:
    """Split between ranks, so that each has about as many tokens: longest first, to the rank with the fewest."""
    longest_first = sorted(sequences, key=lambda one: (-one.length, one.number))
    return _even(longest_first, lambda one: one.length, ranks)


def _even(items: Iterable[Item], tokens: Callable[[Item], int], shares: int) -> list[list[Item]]:
    """Give each in its turn to the first share with the fewest tokens."""
    split: list[list[Item]] = [[] for _ in range(shares)]
    fewest = [(0, share) for share in range(shares)]
    for item in items:
        had, share = heapq.heappop(fewest)
        split[share].append(item)
        heapq.heappush(fewest, (had + tokens(item), share))
    return split


def micro_batches(
    sequences: Iterable[TrainedSequence], most_tokens: int, *, packed: bool
) -> list[list[TrainedSequence]]:
    """Put sequences together for one pass of the model each: longest first, while the tokens fit.

    Parameters
    ----------
    most_tokens
        Of one micro-batch, counting padding where it is not `packed`; a longer sequence is alone.
    """
    found: list[list[TrainedSequence]] = []
    taken: list[int] = []  # tokens of each
    for sequence in sorted(sequences, key=lambda one: (-one.length, one.number)):
        # First fit, decreasing: at most 11/9 of the fewest micro-batches.
        for at, micro in enumerate(found):
            tokens = taken[at] + (sequence.length if packed else micro[0].length)
            if tokens <= most_tokens:
                micro.append(sequence)
                taken[at] = tokens
                break
        else:
            found.append([sequence])
            taken.append(sequence.length)
    return found


def _tokens(sequences: Sequence[Any]) -> int:
    return sum(sequence.length for sequence in sequences)
