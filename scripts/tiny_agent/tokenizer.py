"""The byte-level tokenizer of tiny-agent: a token is a byte (id = its value) or a special token.

No merges: the ids of a text never depend on what stands beside it, so that history can be extended
token by token. The chat template is ChatML as Qwen writes it, one block per message, and never
rewrites history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

VOCABULARY = 320
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
_NAMED = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
# Only these two hide from plain text; the others must survive decoding, since agents parse them.
_CONTROL = frozenset({END_OF_TEXT, "<|im_start|>", END_OF_TURN})
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content"
    " + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def special_tokens() -> list[str]:
    """Special tokens in the order of their ids, from 256 on, the unused ones last."""
    unused = VOCABULARY - 256 - len(_NAMED)
    return [*_NAMED, *(f"<|reserved_{number}|>" for number in range(unused))]


def token_id(special: str) -> int:
    """Id of a special token."""
    return 256 + special_tokens().index(special)


def make_tokenizer() -> Any:
    """The tokenizer with its chat template, ready to be saved or used."""
    letters = _byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=token in _CONTROL) for token in special_tokens()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, prompt: bool = False) -> str:
    """Text of messages as the chat template writes them; with `prompt`, an assistant turn is opened."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    return str(text)


def save_tokenizer(directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    make_tokenizer().save_pretrained(directory, save_jinja_files=False)
    # The class name that every version of transformers knows; newer ones write another.
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    config.pop("backend", None)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers use for each byte, by byte.

    Printable Latin-1 bytes stand for themselves, the others follow from U+0100 on (GPT-2's table).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    letters = [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]
    assert sorted(letters) == sorted(ByteLevel.alphabet())
    return letters
