"""Training of the reward model: the lower layers of the shipped agent with one output, on pairs of attempts."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from scripts.reward_model.attempts import AttemptPair


@dataclass(frozen=True, slots=True)
class RewardTraining:
    """How to train.

    Attributes
    ----------
    layers
        Layers taken over from the agent, from below.
    batch_tokens
        Tokens of one train step at most, padding included.
    rate
        Peak learning rate (AdamW, one cycle).
    epochs
        Passes over the pairs.
    absolute_weight
        Weight of the loss of each attempt by itself beside that of the pair: it puts the scores of solved attempts
        above 0 and those of failed ones below.
    """

    layers: int = 3
    batch_tokens: int = 6_000
    rate: float = 1e-3
    epochs: int = 1
    absolute_weight: float = 0.2


def from_agent(agent: Path, layers: int) -> Any:
    """A classifier of one label whose layers are the agent's lower ones: they know how to copy and compare."""
    whole = Qwen3ForCausalLM.from_pretrained(agent, dtype=torch.float32)
    settings = whole.config.to_dict()
    settings |= {"num_hidden_layers": layers, "layer_types": settings["layer_types"][:layers]}
    settings["architectures"] = ["Qwen3ForSequenceClassification"]
    for labels in ("id2label", "label2id"):
        settings.pop(labels, None)
    config = Qwen3Config(**{**settings, "num_labels": 1, "use_cache": False})
    model = Qwen3ForSequenceClassification(config)
    taken = {name: weight for name, weight in whole.model.state_dict().items() if name in model.model.state_dict()}
    model.model.load_state_dict(taken)
    torch.nn.init.zeros_(model.score.weight)
    return model


def train(pairs: list[AttemptPair], agent: Path, seed: int, options: RewardTraining) -> tuple[Any, dict[str, Any]]:
    """Train on differences of scores (Bradley-Terry); returns the model and what to put on record."""
    torch.manual_seed(seed)
    model = from_agent(agent, options.layers)
    model.train()
    order = _batches(pairs, seed, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=len(order) + 2, pct_start=0.1)
    started, tokens, mean_loss = time.monotonic(), 0, float("nan")
    for step, indexes in enumerate(order):
        batch = [pairs[index] for index in indexes]
        scores = scores_of(model, [each for pair in batch for each in (pair.solved, pair.failed)])
        solved, failed = scores[0::2], scores[1::2]
        by_pair = torch.nn.functional.softplus(failed - solved).mean()
        alone = torch.nn.functional.softplus(torch.cat([-solved, failed])).mean()
        optimizer.zero_grad()
        (by_pair + options.absolute_weight * alone).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tokens += sum(len(pair.solved) + len(pair.failed) for pair in batch)
        mean_loss = by_pair.item() if step == 0 else 0.95 * mean_loss + 0.05 * by_pair.item()
        if step % 20 == 0:
            seconds = time.monotonic() - started
            print(f"{step}/{len(order)} loss {mean_loss:.4f} {tokens / seconds:.0f} tokens/s", file=sys.stderr)
    record = {
        "train_steps": len(order),
        "tokens": tokens,
        "loss": round(mean_loss, 4),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    return model.eval(), record


def _batches(pairs: list[AttemptPair], seed: int, options: RewardTraining) -> list[list[int]]:
    """Indexes of pairs of like length, batch by batch, in random order; all pairs in each epoch."""
    rng = random.Random(f"reward-batches-{seed}")
    order = sorted(range(len(pairs)), key=lambda index: pairs[index].longest)
    groups: list[list[int]] = [[]]
    for index in order:
        if groups[-1] and 2 * (len(groups[-1]) + 1) * pairs[index].longest > options.batch_tokens:
            groups.append([])
        groups[-1].append(index)
    chosen: list[list[int]] = []
    for _ in range(options.epochs):
        rng.shuffle(groups)
        chosen += groups
    return chosen


def scores_of(model: Any, batch: Sequence[np.ndarray]) -> torch.Tensor:
    """The output at the last token of each attempt. Padding follows it: causal attention needs no mask."""
    lengths = torch.tensor([len(tokens) for tokens in batch])
    ids = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
    for row, tokens in enumerate(batch):
        ids[row, : len(tokens)] = torch.from_numpy(tokens)
    hidden = model.model(input_ids=ids).last_hidden_state
    scores: torch.Tensor = model.score(hidden[torch.arange(len(batch)), lengths - 1]).squeeze(-1)
    return scores


@torch.inference_mode()
def measure(model: Any, pairs: list[AttemptPair]) -> dict[str, Any]:
    """On these pairs: share ordered rightly, share of attempts on the right side of 0, area under the ROC curve."""
    solved = np.array([float(scores_of(model, [pair.solved])[0]) for pair in pairs])
    failed = np.array([float(scores_of(model, [pair.failed])[0]) for pair in pairs])
    above = sum(float((score > failed).sum() + 0.5 * (score == failed).sum()) for score in solved)
    return {
        "pairs": len(pairs),
        "pairs_ordered": round(float((solved > failed).mean()), 3),
        "accuracy": round(float((np.concatenate([solved > 0, failed < 0])).mean()), 3),
        "auc": round(above / len(solved) ** 2, 3),
    }
