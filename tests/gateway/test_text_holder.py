"""What is told of a text before its step ends: the same whatever the pieces, and never a piece of a call."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.chat.conversation import ChatMessage
from heddle_dask.gateway.text_holder import CALL_MARKERS, TextHolder, TextPart

CALL = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
pieces_of_replies = st.sampled_from(
    ["<think>", "</think>", "\n", " ", "plan", "<", "<tool", "_call", "<|im", "a < b", "[TOOL", "[1]", "{", "}", CALL]
)
replies = st.lists(pieces_of_replies, max_size=12).map("".join)


def told(parts: list[TextPart]) -> tuple[str, str]:
    thinking, content = ("".join(part.text for part in parts if part.kind == kind) for kind in ("thinking", "content"))
    return thinking, content


@given(replies, st.lists(st.integers(0, 100), max_size=20), st.booleans())
def test_pieces_make_no_difference(reply: str, cuts: list[int], tools: bool) -> None:
    markers = CALL_MARKERS if tools else ()
    whole, parted = (TextHolder(markers, holds_json=tools) for _ in range(2))
    at, parts = 0, []
    for cut in [*sorted({cut for cut in cuts if cut < len(reply)}), len(reply)]:
        parts += parted.add(reply[at:cut])
        at = cut
    assert told(parts) == told(whole.add(reply))
    message = ChatMessage("assistant", reply)
    assert parted.end(message) == whole.end(message)


@given(replies)
def test_nothing_is_told_from_where_a_call_may_begin(reply: str) -> None:
    thinking, content = told(TextHolder(CALL_MARKERS).add(reply))
    assert not any(marker in thinking + content for marker in CALL_MARKERS)


@given(st.text(max_size=30), st.text(max_size=30), st.integers(1, 7))
def test_a_message_is_told_whole(thinking: str, content: str, piece: int) -> None:
    thinking = thinking.strip().replace("<", "(")
    content = content.strip().replace("<", "(")
    raw = (f"<think>\n{thinking}\n</think>\n\n" if thinking else "") + content + CALL
    holder = TextHolder(CALL_MARKERS)
    parts = [part for at in range(0, len(raw), piece) for part in holder.add(raw[at : at + piece])]
    parts += holder.end(ChatMessage("assistant", content, thinking))
    assert told(parts) == (thinking, content)


def test_text_comes_at_once_and_white_space_when_something_follows_it() -> None:
    holder = TextHolder(CALL_MARKERS)
    assert told(holder.add("Let me look. \n")) == ("", "Let me look.")
    assert told(holder.add("It is")) == ("", " \nIt is")
    assert holder.add("\n<tool") == []
    assert told(holder.add("box>")) == ("", "\n<toolbox>")
    assert holder.add("<tool_call>{}</tool_call>") == []
    assert told(holder.end(ChatMessage("assistant", "Let me look. \nIt is\n<toolbox>!"))) == ("", "!")


def test_thinking_that_no_parser_took_out_is_told_as_thinking() -> None:
    holder = TextHolder()
    parts = holder.add("<think>a plan</think>done")
    parts += holder.end(ChatMessage("assistant", "<think>a plan</think>done"))
    assert told(parts) == ("a plan", "done")


@pytest.mark.parametrize("reply", ['{"name": "run"}', '[{"name": "run"}]'])
def test_a_reply_that_is_json_as_a_whole_may_be_a_call(reply: str) -> None:
    assert TextHolder(CALL_MARKERS, holds_json=True).add(reply) == []
    assert told(TextHolder(CALL_MARKERS).add(reply)) == ("", reply)


def test_a_text_that_ends_the_turn_is_not_told() -> None:
    holder = TextHolder(("STOP",))
    assert told([*holder.add("end ST"), *holder.add("OP")]) == ("", "end")
    assert told(holder.end(ChatMessage("assistant", "end "))) == ("", " ")
