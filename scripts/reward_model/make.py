"""Make the reward model: ``python -m scripts.reward_model.make --out DIR --seed 0``.

Writes a Hugging Face model directory (config, weights, tokenizer) and ``training.json``, which says how it was made and
what it is worth on tasks of the test split.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from scripts.reward_model.attempts import make_pairs
from scripts.reward_model.train import RewardTraining, measure, train
from scripts.tiny_agent.tokenizer import make_tokenizer, save_tokenizer

AGENT = Path(__file__).parents[2] / "pipelines" / "tiny_agent" / "checkpoint"


def main() -> None:
    """Read the arguments, make attempts, train, measure, save."""
    parser = argparse.ArgumentParser(description="Make the reward model of the shipped agent.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=5_000)
    parser.add_argument("--held-out", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=RewardTraining().epochs)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    tokenizer = make_tokenizer()
    pairs = make_pairs(arguments.tasks, arguments.seed, "train", tokenizer)
    held_out = make_pairs(arguments.held_out, arguments.seed + 1, "test", tokenizer)
    print(f"{len(pairs)} pairs after {time.monotonic() - started:.0f} s", file=sys.stderr)
    options = RewardTraining(epochs=arguments.epochs)
    model, record = train(pairs, AGENT, arguments.seed, options)
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.out)
    save_tokenizer(arguments.out)
    record |= {
        "seed": arguments.seed,
        "pairs": len(pairs),
        "options": asdict(options),
        "held_out": measure(model, held_out),
        "minutes_in_all": round((time.monotonic() - started) / 60, 1),
    }
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
