"""Slots and context of engines that do not choose them by the memory of GPUs, and the model that comes along."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import EngineSpec

TINY_AGENT = "tiny-agent"
"""Names the model of the package `pipelines`, where no directory of that name is."""

SMALL_SLOTS = 16
"""On CPUs the time of an iteration grows with the batch, so that more slots make every step slower. With 16 the shipped
model was measured (`benchmarks/`)."""

SMALL_CONTEXT_TOKENS = 4096
"""A CPU build computes a prompt whole, in one iteration, and its KV cache is 1 GiB: a longer one would stop all
others for seconds."""


def with_small_defaults(spec: EngineSpec) -> EngineSpec:
    """The spec with 16 slots and the model's context, at most 4,096 tokens, where it names none."""
    slots = SMALL_SLOTS if spec.slots is None else spec.slots
    longest = spec.max_model_len
    if longest is None:
        longest = min(SMALL_CONTEXT_TOKENS, model_context_tokens(spec.model) or SMALL_CONTEXT_TOKENS)
    return replace(spec, slots=slots, max_model_len=longest)


def shipped_model() -> Path:
    """The checkpoint that comes with the package `pipelines`."""
    # By its file beside this package: a project may have a package `pipelines` of its own.
    path = Path(__file__).parents[2] / "pipelines" / "tiny_agent" / "checkpoint"
    if (path / "config.json").is_file():
        return path
    raise BadInput(
        "the tiny-agent checkpoint is not installed: give a model directory, or make one in a checkout with "
        "`python -m scripts.tiny_agent.make --out DIR`"
    )


def model_context_tokens(model: str) -> int | None:
    """The longest context that the configuration of a model directory states; None where it states none."""
    if not (Path(model) / "config.json").is_file():
        return None
    # It needs numpy, which commands that start no engine do without.
    from heddle_dask.cost.model_config import read_config

    config = read_config(model)
    inner = config.get("text_config")  # of multimodal models
    for each in (config, inner if isinstance(inner, dict) else {}):
        tokens = each.get("max_position_embeddings")
        if isinstance(tokens, int) and tokens > 1:
            return tokens
    return None
