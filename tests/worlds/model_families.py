"""Model directories of families whose chat template TRL ships, with its special tokens on the shipped tokenizer.

The tokenizer of the shipped model is byte-level, so that it has all texts; what a family's own tokenizer would do with
plain text is not told by it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

_MARKS = r"<\|[^|<>\s]+\|>|<\uff5c[^\uff5c]+\uff5c>|<\|\"\|>|<\|[a-z_]+>|<[a-z_]+\|>|\[gMASK\]|<sop>"
_PLAIN = r"</?think>|</?tool_call>|</?tool_response>|</?arg_key>|</?arg_value>"


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes
    ----------
    template
        Name of its chat template in TRL.
    end, bos
        The tokens that end a turn and begin a conversation.
    more_ends
        Markers of the next role, where these end a turn.
    more
        Special tokens that its template does not show.
    variables
        Of its template, as `renderers` sets them.
    """

    template: str
    end: str = "<|im_end|>"
    bos: str = ""
    more_ends: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    variables: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "qwen3": Family("qwen3", more=("<|endoftext|>",)),
    "qwen3-vl": Family("qwen3_vl", more=("<|endoftext|>",)),
    "qwen3.5": Family("qwen3_5_think", more=("<|endoftext|>",)),
    "qwen3.6": Family("qwen3_6", more=("<|endoftext|>",)),
    "qwen3.8": Family("qwen3_8", more=("<|endoftext|>",)),
    "nemotron-3": Family("nemotron_3_nano", more=("<|endoftext|>",)),
    "nemotron-3-ultra": Family("nemotron_3_ultra", more=("<|endoftext|>",)),
    "nemotron-3.5": Family("nemotron_3_5_lightning", more=("<|endoftext|>",)),
    "glm-4.5": Family("glm4moe", "<|endoftext|>", more_ends=("<|user|>", "<|observation|>")),
    "gemma4": Family(
        "gemma4_v5",
        "<turn|>",
        "<bos>",
        more_ends=("<|tool_response>",),
        more=("<eos>", "<|image>", "<|image|>", "<image|>"),
    ),
    "llama-3": Family(
        "llama3_2",
        "<|eot_id|>",
        "<|begin_of_text|>",
        more=("<|end_of_text|>", "<|eom_id|>", "<|python_tag|>"),
        variables={"date_string": "26 Jul 2024"},
    ),
    "deepseek-r1": Family(
        "deepseekv3", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
    ),
}


def template_of(family: Family) -> str:
    """The chat template as TRL ships it."""
    return files("trl").joinpath("chat_templates", f"{family.template}.jinja").read_text(encoding="utf-8")


def write_model(family: Family, base: Path, folder: Path) -> None:
    """Write the directory of a family: tokenizer, template, and what ends a turn."""
    text = template_of(family)
    own = [*re.findall(_MARKS, text), family.end, *family.more, *family.more_ends]
    special = [token for token in dict.fromkeys([family.bos, *own]) if token]
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    plain = dict.fromkeys([*re.findall(_PLAIN, text), "<think>", "</think>"])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    named = {"eos_token": family.end} | ({"bos_token": family.bos} if family.bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    ends = [tokenizer.token_to_id(token) for token in (family.end, *family.more_ends)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
