"""Imitation: next-token loss on the experts' turns alone, AdamW, one-cycle cosine."""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipelines.tiny_agent.conversations import Conversation
from pipelines.tiny_agent.tokenizer import END_OF_TEXT, END_OF_TURN, VOCABULARY, token_id


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How to train.

    Attributes
    ----------
    batch_tokens
        Tokens of one train step at most, padding included.
    """

    batch_tokens: int = 6_000
    learning_rate: float = 4e-3
    warmup_share: float = 0.05
    weight_decay: float = 0.05
    beta2: float = 0.98


def make_config() -> Qwen3Config:
    """Qwen3 with 0.83 million parameters; head size 32 is the least that vLLM takes on a CPU."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=token_id(END_OF_TURN),
        pad_token_id=token_id(END_OF_TEXT),
        initializer_range=0.05,
    )


def batches(conversations: list[Conversation], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indexes of conversations of like length, batch by batch, in random order.

    Padding to the longest of a batch wastes little, and plain causal attention needs no mask. The
    first fifth comes from the shorter half: copying is learned sooner in short contexts.
    """
    order = sorted(range(len(conversations)), key=lambda i: len(conversations[i].token_ids))
    groups: list[list[int]] = [[]]
    for index in order:
        # Sorted by length, so the newest is the longest of its batch.
        longest = len(conversations[index].token_ids)
        if groups[-1] and (len(groups[-1]) + 1) * longest > batch_tokens:
            groups.append([])
        groups[-1].append(index)
    rng = random.Random(f"batches-{seed}")
    short = groups[: len(groups) // 2]
    rng.shuffle(short)
    first = short[: len(groups) // 5]
    rest = short[len(first) :] + groups[len(groups) // 2 :]
    rng.shuffle(rest)
    return first + rest


def train(
    conversations: list[Conversation], seed: int, options: TrainingOptions
) -> tuple[Any, dict[str, float]]:
    """Train on each conversation once; returns the model and what to put on record."""
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(make_config())
    _sharpen_attention(model)
    model.train()
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, options.weight_decay),
        lr=options.learning_rate,
        betas=(0.9, options.beta2),
    )
    order = batches(conversations, options.batch_tokens, seed)
    started = time.monotonic()
    mean_loss = float("nan")
    tokens = 0
    for step, indexes in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(step, len(order), options.warmup_share)
        batch = [conversations[index] for index in indexes]
        loss = _batch_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += sum(len(conversation.token_ids) for conversation in batch)
        mean_loss = loss.item() if step == 0 else 0.97 * mean_loss + 0.03 * loss.item()
        if step % 20 == 0:
            rate = tokens / (time.monotonic() - started)
            print(f"{step}/{len(order)} loss {mean_loss:.4f} {rate:.0f} tokens/s", file=sys.stderr)
    record = {
        "train_steps": len(order),
        "tokens": tokens,
        "loss": round(mean_loss, 4),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    return model, record


def _sharpen_attention(model: Any) -> None:
    """Start the norms of queries and keys at 2.

    At 1 no attention score can exceed the root of the head size, 5.7: too flat to single out one of a
    thousand tokens, and copying would have to wait until the gains have grown.
    """
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 2.0)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, 2.0)


def _parameter_groups(model: Any, decay: float) -> list[dict[str, object]]:
    """Matrices decay; gains of norms do not."""
    weights = list(model.parameters())
    return [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]


def _schedule(step: int, steps: int, warmup_share: float) -> float:
    warmup = max(1, int(steps * warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _batch_loss(model: Any, batch: list[Conversation]) -> torch.Tensor:
    longest = max(len(conversation.token_ids) for conversation in batch)
    ids = torch.full((len(batch), longest), token_id(END_OF_TEXT))
    learned = torch.zeros((len(batch), longest), dtype=torch.bool)
    for row, conversation in enumerate(batch):
        ids[row, : len(conversation.token_ids)] = torch.from_numpy(conversation.token_ids)
        learned[row, : len(conversation.learned)] = torch.from_numpy(conversation.learned)
    hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state
    wanted = learned[:, 1:]
    # The output layer only where there is something to learn: half of the tokens.
    logits = model.lm_head(hidden[wanted])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][wanted])
