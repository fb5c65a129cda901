"""What counts of a reply: what is behind its thinking."""

from __future__ import annotations

import pytest

from heddle_dask.chat.reply_parts import answer_of


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("4", False, "4"),
        ("", False, ""),
        ("<think>2+2</think>\n\n4", False, "4"),
        ("\n<think>\n</think>4", False, "4"),
        ("2+2 is\n</think>4", False, "4"),
        ("2+2 is\n</think>4", True, "4"),
        ("2+2 is", True, ""),
        ("<think>2+2 is", False, ""),
        ("<think>a</think> <think>b</think> 4", False, "4"),
        ("write <think>x</think> in it", False, "write <think>x</think> in it"),
    ],
)
def test_the_answer_is_behind_the_thinking(text: str, opened: bool, answer: str) -> None:
    assert answer_of(text, thinking_opened=opened) == answer
