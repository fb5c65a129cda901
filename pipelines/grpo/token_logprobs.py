"""One pass of a model over a micro-batch: logprob and entropy of the trained tokens, and of no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipelines.grpo.sequences import TrainedSequence


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the trained tokens of all sequences of a micro-batch, in order.

    Attributes
    ----------
    logprobs
        Under the temperature with which each token was sampled.
    entropy
        Of the same distributions, in nats, without a gradient.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor


def token_logprobs(
    model: Any, sequences: Sequence[TrainedSequence], device: torch.device, *, packed: bool
) -> TokenLogprobs:
    """Run the model; the output layer only where a trained token is predicted."""
    run = _packed_logits if packed else _padded_logits
    logits = run(model, sequences, device).float()
    temperatures = torch.from_numpy(np.concatenate([one.temperatures for one in sequences])).to(device)
    labels = torch.from_numpy(np.concatenate([one.token_ids[one.targets] for one in sequences])).to(device)
    logprobs = torch.log_softmax(logits / temperatures[:, None], -1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return TokenLogprobs(logprobs.gather(-1, labels[:, None]).squeeze(-1), entropy)


def _packed_logits(model: Any, sequences: Sequence[TrainedSequence], device: torch.device) -> torch.Tensor:
    lengths = [one.length for one in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    ids = torch.from_numpy(np.concatenate([one.token_ids[:-1] for one in sequences])).to(device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    kept = np.concatenate([start + one.targets - 1 for start, one in zip(starts, sequences, strict=True)])
    logits: torch.Tensor = model(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=torch.from_numpy(kept).to(device),
        segments=lengths,
    ).logits
    return logits[0]


def _padded_logits(model: Any, sequences: Sequence[TrainedSequence], device: torch.device) -> torch.Tensor:
    longest = max(one.length for one in sequences)
    ids = np.zeros((len(sequences), longest), np.int64)
    real = np.zeros_like(ids)
    for row, one in enumerate(sequences):
        ids[row, : one.length] = one.token_ids[:-1]
        real[row, : one.length] = 1
    rows = np.concatenate([np.full(len(one.targets), row) for row, one in enumerate(sequences)])
    columns = np.concatenate([one.targets - 1 for one in sequences])
    # The output layer takes the same columns of all rows.
    kept, at = np.unique(columns, return_inverse=True)
    logits: torch.Tensor = model(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=torch.from_numpy(real).to(device),
        use_cache=False,
        logits_to_keep=torch.from_numpy(kept).to(device),
    ).logits
    return logits[torch.from_numpy(rows).to(device), torch.from_numpy(at).to(device)]
