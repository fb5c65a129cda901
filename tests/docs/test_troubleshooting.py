"""The messages on the page of troubles are messages of this code."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from worlds.markdown_blocks import DOCS, ROOT

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = [
    message
    for header, *rows in (table.splitlines() for table in PAGE.split("\n\n") if table.startswith("| message |"))
    for message in re.findall(r"^\| `([^`]+)` \|", "\n".join(rows), re.MULTILINE)
]


@cache
def texts_of_the_code() -> list[str]:
    """Every literal text of the package, with `…` for what an f-string puts in."""
    found = []
    for path in (ROOT / "heddle_dask").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_of_the_code(message: str) -> bool:
    """Whether one text of the code has the fixed parts of the message, in their order."""
    pattern = ".*".join(re.escape(part.strip()) for part in message.split("…"))
    return any(re.search(pattern, text, re.DOTALL) for text in texts_of_the_code())


@pytest.mark.parametrize("message", MESSAGES)
def test_the_message_is_of_this_code(message: str) -> None:
    assert is_of_the_code(message)


def test_the_page_has_messages_and_a_made_up_one_is_noticed() -> None:
    assert len(MESSAGES) >= 25
    assert not is_of_the_code("the moon has … phases: use another one")
