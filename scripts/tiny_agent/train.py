"""Imitation: next-token loss on the experts' turns alone, Muon and AdamW, one-cycle cosine."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.tiny_agent.conversations import Conversation
from scripts.tiny_agent.initial_weights import prepare
from scripts.tiny_agent.tokenizer import END_OF_TEXT, END_OF_TURN, VOCABULARY, token_id


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How to train.

    Attributes
    ----------
    batch_tokens
        Tokens of one train step at most, padding included.
    copy_steps
        Train steps of the warm-up on repeated words, before the first conversation.
    muon_rate, adam_rate
        Peak learning rates of the two optimizers.
    """

    batch_tokens: int = 5_000
    copy_steps: int = 150
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    warmup_share: float = 0.03
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
    conversations: list[Conversation],
    seed: int,
    options: TrainingOptions,
    keep: Callable[[Any], None],
) -> tuple[Any, dict[str, Any]]:
    """Train on each conversation once; returns the model and what to put on record.

    `keep` gets the model every 200 train steps, lest an interruption cost everything.
    """
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(make_config())
    prepare(model)
    model.train()
    order = batches(conversations, options.batch_tokens, seed)
    copying = random.Random(f"copying-{seed}")
    steps = options.copy_steps + len(order)
    optimizers = _optimizers(model, options)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    started = time.monotonic()
    mean_loss = float("nan")
    tokens = 0
    for step in range(steps):
        share = _schedule(step, steps, options.warmup_share)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
        if step < options.copy_steps:
            batch = draw_copying(copying, count=32, length=64 + 64 * (step % 2))
        else:
            batch = [conversations[index] for index in order[step - options.copy_steps]]
        loss = _batch_loss(model, batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        tokens += sum(len(conversation.token_ids) for conversation in batch)
        fresh = step in (0, options.copy_steps)
        mean_loss = loss.item() if fresh else 0.97 * mean_loss + 0.03 * loss.item()
        if step % 20 == 0:
            rate = tokens / (time.monotonic() - started)
            print(f"{step}/{steps} loss {mean_loss:.4f} {rate:.0f} tokens/s", file=sys.stderr)
        if step % 200 == 199:
            keep(model)
    record = {
        "train_steps": steps,
        "tokens": tokens,
        "loss": round(mean_loss, 4),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    return model, record


def draw_copying(rng: random.Random, count: int, length: int) -> list[Conversation]:
    """A warm-up: random words that come again and again; learned is how a word goes on."""
    drawn = []
    for _ in range(count):
        letters = rng.choice([range(48, 58), range(97, 123), range(33, 127), range(48, 58)])
        words = [[rng.choice(letters) for _ in range(rng.randint(2, 8))] for _ in range(rng.randint(2, 4))]
        ids: list[int] = []
        marks: list[bool] = []
        known = [False] * len(words)
        while len(ids) < length:
            number = rng.randrange(len(words))
            ids += [*words[number], rng.choice((32, 10, 44, 46))]
            marks += [False, *[known[number]] * (len(words[number]) - 1), False]
            known[number] = True
        drawn.append(Conversation(np.array(ids, dtype=np.int32), np.array(marks, dtype=bool)))
    return drawn


def _optimizers(model: Any, options: TrainingOptions) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers (it finds copying several times sooner), else AdamW."""
    named = list(model.named_parameters())
    inner = [weight for name, weight in named if weight.dim() == 2 and "embed" not in name]
    outer = [weight for name, weight in named if weight.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(inner, lr=options.muon_rate, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(outer, lr=options.adam_rate, betas=(0.9, options.beta2), weight_decay=0.0),
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
