"""A script's replies: chosen by the context alone, and an interrupted one goes on where it was cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.chat.tool_calls import ToolCall, parse_calls
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.defaults import shipped_model
from heddle_dask.engines.emulated.scripted import ScriptedSource

SYSTEM = {"role": "system", "content": "You are an agent."}
TASK = {"role": "user", "content": "Count the files of /data."}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.load(str(shipped_model()))


def source(folder: Path, *lines: object) -> ScriptedSource:
    path = folder / "script.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return ScriptedSource(str(path), str(shipped_model()), 1, 20.0, 0)


def drawn(source: ScriptedSource, context: list[int], count: int = 500) -> tuple[list[int], bool]:
    tokens, logprobs, stopped = source.draw(context, count, seed=1, ignore_eos=False)
    assert len(tokens) == len(logprobs)
    return tokens, stopped


def test_turns_and_texts_choose_the_reply(tmp_path: Path, template: ChatTemplate) -> None:
    scripted = source(
        tmp_path,
        {"latest": "exit 1", "content": "It failed."},
        {"prompt": "title for", "content": "A title"},
        {"turn": 0, "content": "I look.", "thinking": "hm", "calls": [{"name": "bash", "arguments": {"c": "ls"}}]},
        {"content": "Three files."},
    )
    first = template.render([SYSTEM, TASK])
    tokens, stopped = drawn(scripted, first)
    assert stopped and tokens[-1] == template.end_token_ids[0]
    text = template.decode(tokens)
    assert text.startswith("<think>\nhm\n</think>\n\nI look.\n")
    assert parse_calls(text) == [ToolCall("bash", {"c": "ls"})]

    second = [*first, *tokens, *template.bridge([{"role": "tool", "content": "a b c"}], ended=True)]
    assert template.decode(drawn(scripted, second)[0]) == "Three files."
    failed = [*first, *tokens, *template.bridge([{"role": "tool", "content": "exit 1"}], ended=True)]
    reply = drawn(scripted, failed)[0]
    assert template.decode(reply) == "It failed."
    # What was said before the last turn is no news.
    later = [*failed, *reply, *template.bridge([{"role": "user", "content": "again"}], ended=True)]
    assert template.decode(drawn(scripted, later)[0]) == "Three files."
    title = template.render([{"role": "user", "content": "Write a title for this."}])
    assert template.decode(drawn(scripted, title)[0]) == "A title"


def test_a_reply_that_was_cut_goes_on(tmp_path: Path, template: ChatTemplate) -> None:
    scripted = source(tmp_path, {"turn": 0, "text": "aaa aaa aaa"}, {"text": "another"})
    context = template.render([TASK])
    whole, _ = drawn(scripted, context)
    for cut in range(1, len(whole)):
        part, stopped = drawn(scripted, context, cut)
        assert (part, stopped) == (whole[:cut], False)
        assert drawn(scripted, [*context, *part]) == (whole[cut:], True)


def test_tokens_are_plausible_where_no_line_fits(tmp_path: Path, template: ChatTemplate) -> None:
    scripted = source(tmp_path, {"turn": 7, "text": "never"})
    assert "never" not in template.decode(drawn(scripted, template.render([TASK]))[0])
    assert drawn(scripted, [5, 6, 7])[0]
    fixed = scripted.draw(template.render([TASK]), 9, seed=1, ignore_eos=True)
    assert len(fixed[0]) == 9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "a", "content": "b"}, "line 1: give either text, or content"),
        ({"turn": 1}, "line 1: give either text, or content"),
        ({"turn": -1, "text": "a"}, "turn is -1"),
        ({"latest": "(", "text": "a"}, "latest is no regular expression"),
        ({"reply": "a"}, "unknown key 'reply'"),
        ({"calls": [{"name": 3}]}, "calls must be a list"),
        (["text"], "line 1 is no JSON object"),
    ],
)
def test_a_line_that_cannot_be_is_refused(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        source(tmp_path, line)


def test_a_script_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        ScriptedSource("none.jsonl", str(shipped_model()), 1, 20.0, 0)
