"""Causal attention of packed sequences: each sees itself alone.

The linear layers of a model take packed sequences as one long row; only attention must know where one ends. One call
for each sequence costs the sum of the squares of the lengths, where a mask over the row would cost the square of the
sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from heddle_dask.core.errors import BadInput

NAME = "heddle_packed"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers' `AttentionInterface`; heads come before tokens in its inputs.

    Parameters
    ----------
    segments
        Lengths of the sequences in the row.
    """
    if attention_mask is not None or options.get("softcap") or options.get("s_aux") is not None:
        raise BadInput("the attention of this model cannot be packed: set packed = false")
    lengths = [query.shape[2]] if segments is None else list(segments)
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    attended = [_causal(*part, scaling, sliding_window) for part in parts]
    return torch.cat(attended, 2).transpose(1, 2).contiguous(), None


def _causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    heads = query.shape[1] // key.shape[1]
    if not query.is_cuda:
        # On CPUs torch has fast kernels only for as many key heads as query heads.
        key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
        # As vLLM does it: logprobs then differ from the engine's by a third of what they do if the kernel scales.
        query, scaling = query * (query.shape[-1] ** -0.5 if scaling is None else scaling), 1.0
    length = query.shape[2]
    mask = None
    if window is not None and length > window:
        at = torch.arange(length, device=query.device)
        behind = at[:, None] - at[None, :]
        mask = (behind >= 0) & (behind < window)
    return scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=query.is_cuda and heads > 1
    )


AttentionInterface.register(NAME, packed_attention)
