"""One pass of a model over a micro-batch: logprob and entropy of the trained tokens, and of no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from pipelines.grpo.attention import Segments
from pipelines.grpo.sequences import TrainedSequence

CHUNK_TOKENS: Final = 1024
"""Tokens whose logits exist at a time."""
# Output layers after which their models do more to the logits: soft caps, scales.
_NOT_LAST: WeakSet[torch.nn.Module] = WeakSet()

Picked = Callable[[torch.Tensor], torch.Tensor]
"""From what a model gives for the columns it was asked for, (rows, columns, x), to one entry for each trained token."""


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
    model: Any,
    sequences: Sequence[TrainedSequence],
    device: torch.device,
    *,
    packed: bool,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenLogprobs:
    """Run the model; the output layer only where a trained token is predicted, on a chunk of tokens at a time.

    The backward pass makes the logits of a chunk again, so there are never more than those of so many tokens.
    A model that changes what its output layer gives has all of them at once.
    """
    inputs, picked = (_packed if packed else _padded)(sequences, device)
    temperatures = torch.from_numpy(np.concatenate([one.temperatures for one in sequences])).to(device)
    labels = torch.from_numpy(np.concatenate([one.token_ids[one.targets] for one in sequences])).to(device)
    layer = model.get_output_embeddings()
    scores = None if layer in _NOT_LAST else _scored_inside(model, inputs, picked, labels, temperatures, chunk_tokens)
    if scores is None:
        _NOT_LAST.add(layer)
        scores = _scores(picked(model(**inputs).logits), labels, temperatures)
    return TokenLogprobs(scores[:, 0], scores[:, 1].detach())


def _scored_inside(
    model: Any,
    inputs: dict[str, Any],
    picked: Picked,
    labels: torch.Tensor,
    temperatures: torch.Tensor,
    chunk_tokens: int,
) -> torch.Tensor | None:
    """The scores, made where the model makes its logits: shards are gathered there. None: the model changed them."""
    layer = model.get_output_embeddings()
    whole = layer.forward

    def score(hidden: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        return _scores(whole(hidden), labels, temperatures)

    def in_chunks(hidden: torch.Tensor) -> torch.Tensor:
        hidden = picked(hidden)
        if len(labels) <= chunk_tokens:
            made = score(hidden, labels, temperatures)
        else:
            parts = zip(*(each.split(chunk_tokens) for each in (hidden, labels, temperatures)), strict=True)
            again = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
            made = torch.cat([again(*part) for part in parts])
        given.append(made)
        return made

    given: list[torch.Tensor] = []
    layer.forward = in_chunks
    try:
        found = model(**inputs).logits
    finally:
        del layer.forward
    return given[0] if found is given[0] else None


def _scores(logits: torch.Tensor, labels: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Logprob and entropy of each token."""
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], -1)
    with torch.no_grad():
        entropy = -logprobs.exp().mul_(logprobs).sum(-1)
    return torch.stack([logprobs.gather(-1, labels[:, None]).squeeze(-1), entropy], -1)


def _packed(sequences: Sequence[TrainedSequence], device: torch.device) -> tuple[dict[str, Any], Picked]:
    lengths = [one.length for one in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    ids = np.concatenate([one.token_ids[:-1] for one in sequences])
    positions = np.concatenate([np.arange(length) for length in lengths])
    kept = np.concatenate([start + one.targets - 1 for start, one in zip(starts, sequences, strict=True)])
    inputs = {
        "input_ids": torch.from_numpy(ids[None]).to(device),
        "position_ids": torch.from_numpy(positions[None]).to(device),
        "logits_to_keep": torch.from_numpy(kept).to(device),
        "segments": Segments(lengths, device),
        "use_cache": False,
    }
    return inputs, lambda given: given[0]


def _padded(sequences: Sequence[TrainedSequence], device: torch.device) -> tuple[dict[str, Any], Picked]:
    longest = max(one.length for one in sequences)
    ids = np.zeros((len(sequences), longest), np.int64)
    real = np.zeros_like(ids)
    for row, one in enumerate(sequences):
        ids[row, : one.length] = one.token_ids[:-1]
        real[row, : one.length] = 1
    rows = np.concatenate([np.full(len(one.targets), row) for row, one in enumerate(sequences)])
    columns = np.concatenate([one.targets - 1 for one in sequences])
    # The output layer is asked for the same columns of all rows.
    kept, at = np.unique(columns, return_inverse=True)
    inputs = {
        "input_ids": torch.from_numpy(ids).to(device),
        "attention_mask": torch.from_numpy(real).to(device),
        "logits_to_keep": torch.from_numpy(kept).to(device),
        "use_cache": False,
    }
    row_of, column_of = torch.from_numpy(rows).to(device), torch.from_numpy(at).to(device)
    return inputs, lambda given: given[row_of, column_of]
