"""One model: a skeleton without weights while it is evicted, and answers while it is loaded."""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from pipelines.model_service.device import OccupiedPlaces
from pipelines.model_service.host_copy import HostCopy, StoredTensor, bytes_of, read_checkpoint, write_copy


class Refused(Exception):
    """This request cannot be answered, now or later; one line."""


class NotResident(Exception):
    """It was asked while it is evicted; one line."""


class ServedModel:
    """A model that is loaded into places of devices and evicted from them.

    Parameters
    ----------
    dtype
        Name of the type of the weights; ``"auto"``: as stored.

    Attributes
    ----------
    scores
        Whether it is a classifier, which scores; otherwise it gives logprobs.
    """

    def __init__(self, directory: Path, dtype: str, max_tokens: int) -> None:
        self._directory = directory
        self._dtype = None if dtype == "auto" else getattr(torch, dtype)
        config = AutoConfig.from_pretrained(directory)
        named = (getattr(config, "architectures", None) or [""])[0]
        self.scores = "Classification" in named or "Reward" in named
        if self.scores and config.num_labels != 1:
            raise Refused(f"{directory} has {config.num_labels} labels: a service scores with models of one label")
        limit = getattr(config, "max_position_embeddings", max_tokens)
        self._max_tokens = min(max_tokens, limit)
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        kind = AutoModelForSequenceClassification if self.scores else AutoModelForCausalLM
        self._model = kind.from_config(config).eval().requires_grad_(False)
        stated = (directory / "generation_config.json").exists()
        self._generation = GenerationConfig.from_pretrained(directory) if stated else self._model.generation_config
        self._names = _shared_names(self._model)
        self._places: OccupiedPlaces | None = None
        self.resident_bytes = 0
        self._clear()
        # What is here now stays: a collection at an eviction looks at nothing of it.
        gc.freeze()

    @property
    def resident(self) -> bool:
        return self._places is not None

    def load(self, places: Sequence[Mapping[str, Any]], copy: Path, cold: bool, keep: bool) -> None:
        """Copy the weights into places: from their copy in host memory, or (`cold`) from the model's files."""
        if self._places is not None:
            raise Refused("it is loaded already")
        if cold or not copy.exists():
            tensors = read_checkpoint(self._directory, self._dtype)
            if keep:
                write_copy(copy, tensors)
            else:
                rows = [
                    StoredTensor(name, str(each.dtype).removeprefix("torch."), tuple(each.shape), 0, each.nbytes)
                    for name, each in tensors.items()
                ]
                self._fill(places, [(row, bytes_of(tensors[row.name])) for row in rows])
                return
            del tensors
        with HostCopy(copy) as opened:
            self._fill(places, opened.parts(), opened.tensors)

    def _fill(self, places: Sequence[Mapping[str, Any]], parts: Any, tensors: Sequence[StoredTensor] = ()) -> None:
        occupied = OccupiedPlaces(places)
        try:
            rows = tensors or [row for row, _ in parts]
            missing = [names[0] for names in self._names if not any(row.name in names for row in rows)]
            if missing:
                raise Refused(f"{self._directory} has no weights for {missing[0]}")
            where = occupied.arrange(rows)
            for row, data in parts:
                parameter = self._parameter(row.name)
                if parameter is not None:
                    parameter.data = occupied.put(row, data, *where[row.name])
        except BaseException:
            self._clear()
            occupied.free()
            raise
        self._places = occupied
        self.resident_bytes = sum(row.length for row in rows)

    def _parameter(self, name: str) -> torch.Tensor | None:
        for names in self._names:
            if name in names:
                found: torch.Tensor = self._model.get_parameter(names[0])
                return found
        return None

    def evict(self) -> None:
        """Drop the weights; nothing is written back."""
        self._clear()
        places, self._places = self._places, None
        if places is not None:
            places.free()

    def _clear(self) -> None:
        for parameter in self._model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        self.resident_bytes = 0
        gc.collect()
        _return_free_memory()

    def tokens_of(self, given: str | Sequence[int]) -> list[int]:
        if isinstance(given, str):
            ids = list(self._tokenizer.encode(given, add_special_tokens=False))
        else:
            ids = [int(each) for each in given]
        if not ids:
            raise Refused("an input is empty: give a text or token ids")
        if len(ids) > self._max_tokens:
            raise Refused(f"an input has {len(ids)} tokens; the service takes {self._max_tokens}")
        vocabulary = self._model.config.vocab_size
        if not all(0 <= each < vocabulary for each in ids):
            raise Refused(f"an input has token ids outside of 0 to {vocabulary - 1}")
        return ids

    @torch.inference_mode()
    def score_batch(self, batch: Sequence[Sequence[int]]) -> list[float]:
        """The logit of each input, at its last token."""
        ids, mask = _padded(batch)
        hidden = self._model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(batch)), mask.sum(1) - 1]
        return [float(each) for each in self._model.score(last).squeeze(-1)]

    @torch.inference_mode()
    def logprobs_batch(self, batch: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each input, the logprob of each token but the first."""
        ids, mask = _padded(batch)
        logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        chosen = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return [row[: len(tokens) - 1].tolist() for row, tokens in zip(chosen, batch, strict=True)]

    @torch.inference_mode()
    def reply(self, messages: Sequence[Mapping[str, str]], max_tokens: int, temperature: float) -> dict[str, str]:
        """The reply to a chat, one at a time: its text, and whether it stopped by itself."""
        if not self.resident:
            raise NotResident("it is not resident")
        template: Any = self._tokenizer.apply_chat_template
        try:
            ids = self.tokens_of(template(messages, add_generation_prompt=True, return_dict=False))
        except TemplateError as error:
            raise Refused(f"its chat template refuses the messages: {error}") from None
        room = min(max_tokens, self._max_tokens - len(ids))
        if room < 1:
            raise Refused(f"the prompt has {len(ids)} tokens; the service takes {self._max_tokens}, reply included")
        chosen = copy.deepcopy(self._generation)
        chosen.update(max_new_tokens=room, do_sample=temperature > 0, temperature=temperature or None)
        asked = torch.tensor([ids])
        every = torch.ones_like(asked)
        written = self._model.generate(asked, attention_mask=every, generation_config=chosen)[0, len(ids) :]
        ends = self._generation.eos_token_id
        stopped = int(written[-1]) in (ends if isinstance(ends, list) else [ends])
        text = str(self._tokenizer.decode(written, skip_special_tokens=True))
        return {"content": text, "finish_reason": "stop" if stopped else "length"}


def _padded(batch: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(tokens) for tokens in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        mask[row, : len(tokens)] = 1
    return ids, mask


def _shared_names(model: torch.nn.Module) -> list[list[str]]:
    """Names of parameters; those of one tensor (tied weights) together."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return list(by_tensor.values())


def _return_free_memory() -> None:
    """Have glibc return freed memory to the system; another C library does so by itself or not at all."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
