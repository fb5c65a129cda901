"""The tokenizer of a model directory and its chat template, read from tokenizer.json and the files beside it.

`transformers` reads the same files, and gives the same tokens and texts (a test compares them); it weighs 130 MB, and
its import takes a second. Directories without tokenizer.json are left to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

# A template reads these under their names.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFiles:
    """What `ChatTemplate` needs of a tokenizer, under the names that `transformers` gives it.

    Parameters
    ----------
    folder
        Directory with tokenizer.json.

    Raises
    ------
    OSError, ValueError, KeyError, TypeError
        A file is missing or is not what it should be.
    """

    is_fast = True

    def __init__(self, folder: Path) -> None:
        config = _object(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # as older directories have it
            config |= _object(folder / "special_tokens_map.json")
        try:
            self._backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library has no class of its own for it
            raise ValueError(str(error)) from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.chat_template = _templates(folder, config.get("chat_template"))
        self._named = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
        self.all_special_tokens = list(dict.fromkeys([*self._named.values(), *_more_special(config)]))
        self._add_missing(config.get("added_tokens_decoder", {}))
        eos = self._named.get("eos_token")
        self.eos_token_id: int | None = None if eos is None else self._backend.token_to_id(eos)

    def _add_missing(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """Tokens that only the configuration knows."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        tokens = [AddedToken(**told[number]) for number in sorted(told, key=int)]
        known = {*vocabulary, *(token.content for token in tokens)}
        tokens += [AddedToken(text, special=True) for text in self.all_special_tokens if text not in known]
        self._backend.add_tokens([token for token in tokens if token.content not in vocabulary])

    def __len__(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens by their ids."""
        return dict(self._backend.get_added_tokens_decoder())

    def __call__(self, text: str, **_options: bool) -> dict[str, Any]:
        """Ids and their characters, without the special tokens that the post-processor adds."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def encode(self, text: str, **_options: bool) -> list[int]:
        """Ids, without the special tokens that the post-processor adds."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], **_options: bool) -> str:
        """Their text, special tokens included."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """What the vocabulary has under these ids."""
        return [self._backend.id_to_token(token) for token in token_ids]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Raises
        ------
        jinja2.exceptions.TemplateError
            The template is no template, or refuses the conversation.
        TypeError, ValueError
            A tool is no JSON schema, or a variable is not what the template expects.
        """
        if tools is not None and not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError("each of the tools must be a JSON schema")
        text = self.chat_template
        if isinstance(text, Mapping):
            text = text["tool_use" if tools is not None and "tool_use" in text else "default"]
        given = {**self._named, **variables, "tools": tools, "documents": None}
        return _compiled(text).render(messages=messages, add_generation_prompt=add_generation_prompt, **given)


def _object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; of one that is missing, an empty one."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} has no JSON object")
    return value


def _content(token: Any) -> str:
    """The text of a token, which is a string or an object with its properties."""
    text = token["content"] if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        raise TypeError(f"a special token is {text!r}")
    return text


def _more_special(config: Mapping[str, Any]) -> Iterator[str]:
    """Special tokens with names of the model's own, or without one."""
    for name, value in config.items():
        if name.endswith("_token") and name not in _NAMED and isinstance(value, str | dict):
            yield _content(value)
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    yield from map(_content, more.values() if isinstance(more, Mapping) else more)


def _templates(folder: Path, configured: Any) -> Any:
    """The chat template, or several by their names; those in files of their own come before the configured one."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("additional_chat_templates/*"))}
    if (folder / "chat_template.jinja").is_file():
        found["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not found and isinstance(configured, list):
        found = {each["name"]: each["template"] for each in configured}
    if not found:
        return configured
    return found["default"] if [*found] == ["default"] else found


class _Generation(Extension):
    """``{% generation %}`` marks what the model wrote, for training; a rendering shows its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 has it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=64)
def _compiled(text: str) -> jinja2.Template:
    # The environment that model templates are written for: `transformers` set it up so.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Without the escapes for HTML that jinja2's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(reason: str) -> None:
    raise jinja2.exceptions.TemplateError(reason)
