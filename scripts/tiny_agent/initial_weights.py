"""Initial weights from which copying is learned in a minute instead of a quarter of an hour.

An agent of bytes lives by copying: numbers and names from tool results into calls. A transformer
learns that only after some heads have come to look at the preceding tokens, and until then training
stands still. So the heads of the first layer start out looking 1, 2, 3 and 4 tokens back. They are
ordinary weights, free to change.
"""

from __future__ import annotations

from typing import Any

import torch

_CONSTANT = 0.6
"""First coordinate of every embedding: what position-only heads read. Its logit share cancels."""
_SHARP_PAIRS = (1.0, 1.0, 1.0, 0.8, 0.6, 0.4)
"""Weights of the fastest rotating pairs; they tell neighbouring positions apart."""


@torch.no_grad()
def prepare(model: Any) -> None:
    """Change a freshly initialised Qwen3 in place."""
    for layer in model.model.layers:
        # At 1 no attention score can exceed the root of the head size, 5.7: too flat to single out
        # one of a thousand tokens.
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 2.0)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, 2.0)
    model.model.embed_tokens.weight[:, 0] = _CONSTANT
    attention = model.model.layers[0].self_attn
    size = model.config.head_dim
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        weight.mul_(0.3)
        weight[:, 0] = 0
    for head in range(model.config.num_key_value_heads):
        attention.k_proj.weight[head * size : (head + 1) * size, 0] = _turned(model.config, 0)
    for head in range(model.config.num_attention_heads):
        attention.q_proj.weight[head * size : (head + 1) * size, 0] = _turned(model.config, head + 1)


def _turned(config: Any, offset: int) -> torch.Tensor:
    """The query that scores highest with the plain key `offset` tokens back, under RoPE."""
    half = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    speed = torch.tensor([theta ** (-pair / half) for pair in range(half)])
    strength = torch.zeros(half)
    strength[: len(_SHARP_PAIRS)] = torch.tensor(_SHARP_PAIRS)
    strength /= strength.norm()
    angle = -speed * offset
    return torch.cat([strength * torch.cos(angle), strength * torch.sin(angle)])
