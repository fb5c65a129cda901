"""Causal attention of packed sequences: each sees itself alone.

The linear layers of a model take packed sequences as one long row; only attention must know where one ends. Attention
with lengths (flash attention on GPUs, in half types), else one call for each sequence, costs the sum of the squares of
the lengths, where a mask over the row would cost the square of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from heddle_dask.core.errors import BadInput

NAME = "heddle_packed"
# What flash attention takes.
_LARGEST_HEAD = 256
_HEAD_STEP = 8


class Segments:
    """Where the sequences of a row lie.

    Attributes
    ----------
    bounds
        The first token of each, and the end of the last one, on the device.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = lengths
        bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.bounds = bounds.to(device)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers' `AttentionInterface`; heads come before tokens in its inputs.

    Parameters
    ----------
    segments
        None: the row is one sequence.
    """
    if attention_mask is not None or options.get("softcap") or options.get("s_aux") is not None:
        raise BadInput("the attention of this model cannot be packed: set packed = false")
    segments = segments or Segments([query.shape[2]], query.device)
    if takes_lengths(query):
        return _with_lengths(query, key, value, segments, scaling, sliding_window)[None], None
    lengths = list(segments.lengths)
    parts = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    attended = [_causal(*part, scaling, sliding_window) for part in parts]
    return torch.cat(attended, 2).transpose(1, 2).contiguous(), None


def takes_lengths(query: torch.Tensor) -> bool:
    """Whether torch has a kernel for all sequences at once."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    head = query.shape[-1]
    newest_needed = (8, 0)
    return (
        query.shape[0] == 1
        and head <= _LARGEST_HEAD
        and head % _HEAD_STEP == 0
        and torch.cuda.get_device_capability(query.device) >= newest_needed
    )


def _with_lengths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    longest, bounds = max(segments.lengths), segments.bounds
    # As many tokens before its own as the window leaves; none after.
    behind = -1 if window is None or longest <= window else window - 1
    attended: Any = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(behind, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended  # type: ignore[no-any-return]


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
