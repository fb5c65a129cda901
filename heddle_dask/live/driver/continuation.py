"""Whether a session may continue a stored run: it must use the same model, tokenizer, sampling, kind
of logprobs and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.services import Sampling

_COMPARED = ("environment", "model", "tokenizer", "sampling", "chat_template_kwargs", "logprobs")
# A program that runs again with other limits would ask for other steps than the journal holds.
_COMPARED_ON_RESUME = ("limits",)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def tokenizer_digest(model: str | Path) -> str:
    """Digest of the tokenizer and template files of a model directory, by name and content."""
    digest = sha256()
    for name in _TOKENIZER_FILES:
        path = Path(model) / name
        if path.is_file():
            digest.update(f"{name}\0{sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _complete(name: str, metadata: Mapping[str, Any]) -> Any:
    """Metadata with the values that an earlier version did not store, since it knew no others."""
    value = metadata[name]
    if name != "sampling" or not isinstance(value, Mapping):
        return value
    # Not those of `Sampling()`, which are the user's settings of today.
    return {**{each.name: each.default for each in fields(Sampling)}, **value}


def _recorded(name: str, recorded: Mapping[str, Any], described: Mapping[str, Any]) -> Any:
    """What the run was made with; a context limit that is given now compares with the one that its engines had."""
    value = _complete(name, recorded)
    if name != "limits" or not isinstance(value, Mapping) or "context_tokens" not in recorded:
        return value
    given = described[name].get("max_context_tokens")
    if value.get("max_context_tokens") is None and given is not None:
        return {**value, "max_context_tokens": recorded["context_tokens"]}
    return value


def check_continues(
    out: Path, recorded: Mapping[str, Any], described: Mapping[str, Any], *, resumes: bool
) -> None:
    """Refuse a session that would put trajectories of another kind into a run.

    Parameters
    ----------
    recorded, described
        Metadata of the run, and of the session. What one of them lacks is not compared.

    Raises
    ------
    BadInput
        They differ; the message has both values.
    """
    compared = (*_COMPARED, *_COMPARED_ON_RESUME) if resumes else _COMPARED
    for name in compared:
        if name not in recorded or name not in described:
            continue
        if _recorded(name, recorded, described) == _complete(name, described):
            continue
        verb = "resumed" if resumes else "appended to"
        raise BadInput(
            f"{out} was made with {name} {recorded[name]}, not {described[name]}: it can only be {verb} with the same"
        )
