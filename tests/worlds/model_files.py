"""Model directories for tests of model services: the shipped ones, and larger ones made from them without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

AGENT = Path(__file__).parents[2] / "pipelines" / "tiny_agent" / "checkpoint"
SHIPPED_REWARD_MODEL = Path(__file__).parents[2] / "pipelines" / "reward_model" / "checkpoint"


def enlarged(directory: Path, vocabulary: int = 60_000) -> Path:
    """The shipped agent with a larger vocabulary: its weights are as large as that, its answers the same kind."""
    shutil.copytree(AGENT, directory)
    config = json.loads((AGENT / "config.json").read_text())
    config["vocab_size"] = vocabulary
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(AGENT / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    more = np.random.default_rng(0).normal(0, 0.05, (vocabulary - len(rows), rows.shape[1]))
    weights["model.embed_tokens.weight"] = np.concatenate([rows, more.astype(rows.dtype)])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def classifier(directory: Path, seed: int = 0) -> Path:
    """A classifier of one label on the layers of the shipped agent, with a random output."""
    shutil.copytree(AGENT, directory)
    config = json.loads((AGENT / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(AGENT / "model.safetensors")
    width = weights["model.embed_tokens.weight"].shape[1]
    weights["score.weight"] = np.random.default_rng(seed).normal(0, 0.1, (1, width)).astype(np.float32)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
