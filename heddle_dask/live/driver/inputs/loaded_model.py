"""The model of a rollout as the driver needs it: its chat template and tokenizer, loaded and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.inputs.rollout_inputs import ChatModel
from heddle_dask.weights.model_directory import model_digest

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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    path: str  # model directory
    chat_template_kwargs: Mapping[str, Any]
    template: ChatTemplate
    template_note: str  # why the template would rewrite history; empty if it does not
    weights: str  # digest of its configuration and weights

    @classmethod
    def load(cls, model: ChatModel, note: Callable[[str], None]) -> LoadedModel:
        """Load the chat template, and say so when it would rewrite history.

        The record keeps what was sampled all the same.

        Parameters
        ----------
        note
            Takes a line for the user.

        Raises
        ------
        BadInput
            The directory has no template or tokenizer that can be used.
        """
        path = str(model.path)
        template = ChatTemplate.load(path).with_variables(model.chat_template_kwargs)
        template_note = ""
        try:
            template.check_append_only()
        except BadInput as error:
            template_note = f"{error}; trajectories keep their history as it was sampled"
            note(f"note: {template_note}")
        return cls(path, model.chat_template_kwargs, template, template_note, model_digest(path))

    def description(self) -> dict[str, Any]:
        """What the metadata of a run say of its model."""
        return {
            "model": self.path,
            "tokenizer": tokenizer_digest(self.path),
            "weights": self.weights,
            **({"template_note": self.template_note} if self.template_note else {}),
            "chat_template_kwargs": dict(self.chat_template_kwargs),
        }


def tokenizer_digest(model: str | Path) -> str:
    """Digest of the tokenizer and template files of a model directory, by name and content."""
    digest = sha256()
    for name in _TOKENIZER_FILES:
        path = Path(model) / name
        if path.is_file():
            digest.update(f"{name}\0{sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
