"""The tokenizer that is read here gives the tokens and texts that `transformers` gives."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chat.test_chat_template import CHATML, QUESTION, SPECIAL, TOOLS, WEATHER, model_dir
from jinja2.exceptions import TemplateError
from transformers.tokenization_utils_fast import PreTrainedTokenizerFast

from heddle_dask.chat.tokenizer import TokenizerFiles

SHIPPED = [Path("pipelines") / model / "checkpoint" for model in ("tiny_agent", "reward_model")]
TEXT = "Zürich\n\n\t<|im_start|>user <|im_end|>日本 x.  y !<tool_call> <extra> 12"
CONVERSATION = [
    {"role": "system", "content": "Be <brief>."},
    QUESTION,
    {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nÄ 2"},
    QUESTION,
]


def same(folder: Path, **variables: Any) -> TokenizerFiles:
    """Both readings of a directory agree."""
    ours, theirs = TokenizerFiles(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for name in ("all_special_tokens", "eos_token_id", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert {n: str(t) for n, t in ours.added_tokens_decoder.items()} == {
        n: str(t) for n, t in theirs.added_tokens_decoder.items()
    }
    ids = theirs.encode(TEXT, add_special_tokens=False)
    assert ours.encode(TEXT) == ids
    both = theirs(TEXT, add_special_tokens=False, return_offsets_mapping=True)
    assert {**ours(TEXT)} == {key: both[key] for key in ("input_ids", "offset_mapping")}
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    if ours.chat_template:
        assert rendered(ours, **variables) == rendered(theirs, **variables)
    return ours


def rendered(tokenizer: Any, **variables: Any) -> list[str]:
    texts = []
    for prompt in (True, False):
        try:
            text = tokenizer.apply_chat_template(
                CONVERSATION, tokenize=False, add_generation_prompt=prompt, **variables
            )
        except TemplateError as error:
            text = f"refused: {error}"
        texts.append(text)
    return texts


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.parent.name)
def test_of_the_shipped_models(folder: Path) -> None:
    same(Path(__file__).parents[2] / folder)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"eos_token": None},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}, "add_bos_token": True},
        {"pad_token": "<pad>", "image_token": "<image>"},
        {"additional_special_tokens": ["<extra>", SPECIAL[0]]},
        {"extra_special_tokens": {"image_token": "<extra>"}},
        {"added_tokens_decoder": {"259": {"content": "<tool_call>", "special": False}}},
        {"added_tokens_decoder": {"258": {"content": SPECIAL[2], "special": True}}, "pad_token": "<pad>"},
    ],
    ids=str,
)
def test_of_special_tokens_in_the_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    same(Path(model_dir(tmp_path, TOOLS, **config)), tools=[WEATHER], enable_thinking=False)


def test_of_older_directories(tmp_path: Path) -> None:
    folder = Path(model_dir(tmp_path, CHATML))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "pad_token": "<pad>"}))
    assert "<s>" in same(folder).all_special_tokens
    (folder / "tokenizer_config.json").unlink()
    assert same(folder).chat_template is None


def test_of_templates_in_files_and_by_name(tmp_path: Path) -> None:
    folder = Path(model_dir(tmp_path, None))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    same(folder)
    named = same(folder, tools=[WEATHER])
    assert "weather" in rendered(named, tools=[WEATHER])[0]
    (folder / "chat_template.jinja").write_text("{{ 'a file goes first' }}")
    assert rendered(same(folder, tools=[WEATHER]))[0] == "a file goes first"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    same(folder, tools=[WEATHER])
    same(folder)


def templates_of_models() -> list[Path]:
    """Of public models, as TRL ships them."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return sorted(Path(spec.origin).with_name("chat_templates").glob("*.jinja"))


@pytest.mark.skipif("trl" not in sys.modules and find_spec("trl") is None, reason="TRL is not installed")
def test_of_templates_of_public_models(tmp_path: Path) -> None:
    folder = Path(model_dir(tmp_path, None, bos_token=SPECIAL[0]))
    found = templates_of_models()
    assert len(found) > 30
    ours = TokenizerFiles(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    shown = 0
    for path in found:
        ours.chat_template = theirs.chat_template = path.read_text(encoding="utf-8")
        for variables in ({}, {"tools": [WEATHER], "enable_thinking": False}):
            try:
                expected = rendered(theirs, **variables)
            except Exception as error:
                with pytest.raises(type(error)):
                    rendered(ours, **variables)
                continue
            assert rendered(ours, **variables) == expected, path.name
            shown += "refused" not in expected[0]
    assert shown > len(found)
