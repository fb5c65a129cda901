"""Make tiny-agent: ``python -m scripts.tiny_agent.make --out DIR --seed 0``.

Writes a Hugging Face model directory (config, weights, tokenizer, chat template) and
``training.json``. Takes less than 30 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from scripts.tiny_agent.conversations import make_conversations
from scripts.tiny_agent.tokenizer import make_tokenizer, save_tokenizer
from scripts.tiny_agent.train import TrainingOptions, train


def main() -> None:
    """Read the arguments, make conversations, train, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--conversations", type=int, default=9_000)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started, cpu_started = time.monotonic(), time.process_time()
    conversations = make_conversations(arguments.conversations, arguments.seed, make_tokenizer())
    print(f"conversations after {time.monotonic() - started:.0f} s", file=sys.stderr)
    options = TrainingOptions()

    def keep(model: Any) -> None:
        save(model, arguments.out)

    model, record = train(conversations, arguments.seed, options, keep)
    save(model, arguments.out)
    record |= {
        "seed": arguments.seed,
        "conversations": len(conversations),
        "options": asdict(options),
        "cpu_minutes_in_all": round((time.process_time() - cpu_started) / 60, 1),
        "minutes_in_all": round((time.monotonic() - started) / 60, 1),
    }
    (arguments.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


def save(model: Any, directory: Path) -> None:
    """Write the model as safetensors with its config and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.to(torch.float32).save_pretrained(directory)
    save_tokenizer(directory)


if __name__ == "__main__":
    main()
