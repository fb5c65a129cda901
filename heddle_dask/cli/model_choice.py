"""Which model a rollout uses, and how long a context it takes."""

from __future__ import annotations

import re
from pathlib import Path

import heddle_dask
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.defaults import SMALL_CONTEXT_TOKENS, model_context_tokens
from heddle_dask.engines.spec import engine_kind

_HUB = re.compile(r"[\w.-]+/[\w.-]+\Z")  # OWNER/NAME
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model")


def shipped_model() -> Path:
    """The checkpoint that comes with the package `pipelines`.

    Raises
    ------
    BadInput
        The package or the checkpoint is absent.
    """
    # By its file beside this package: a project may have a package `pipelines` of its own.
    path = Path(heddle_dask.__file__).parents[1] / "pipelines" / "tiny_agent" / "checkpoint"
    if (path / "config.json").is_file():
        return path
    raise BadInput(
        "the tiny-agent checkpoint is not installed: give --model DIR, or make one in a checkout with "
        "`python -m scripts.tiny_agent.make --out DIR`"
    )


def chosen_model(model: str | None, engine: str) -> str:
    """The model directory asked for, checked, or the shipped one.

    The path is made absolute: workers and later readers of the run have other working directories. The emulated
    engine needs no weights, but a directory for the tokenizer.

    Raises
    ------
    BadInput
        The directory does not exist or holds no model.
    """
    if model is None:
        return str(shipped_model())
    engine_kind(engine).check_model(model)
    if not Path(model).is_dir():
        hint = "give a directory with a tokenizer"
        if _HUB.match(model):
            hint += f"; download a model of a hub first: hf download {model} --local-dir DIR"
        raise BadInput(f"model directory {model} does not exist: {hint}")
    if not any(next(Path(model).glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise BadInput(f"model directory {model} is no model: it has no tokenizer (tokenizer.json)")
    return str(Path(model).resolve())


def context_limit(model: str, asked: int | None) -> int:
    """Longest context: as asked, else what the model's configuration takes, at most `SMALL_CONTEXT_TOKENS`."""
    if asked is not None:
        return asked
    return min(SMALL_CONTEXT_TOKENS, model_context_tokens(model) or SMALL_CONTEXT_TOKENS)
