"""The Python blocks of the documentation and the README run, in their order on a page, on emulated engines."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from worlds.markdown_blocks import PAGES, ROOT, Block, blocks, blocks_of

from heddle_dask import LocalRolloutCluster

WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


def my_tool(text: str) -> str:
    """The tool that blocks call without defining it."""
    return "42"


def execute(block: Block, scope: dict[str, Any], modules_dir: Path) -> None:
    """Run one block, or save it where it names its file; messages name page and line."""
    if block.reason_not_to_run is not None:
        return
    source = "\n" * (block.line - 1) + block.text
    if block.words and block.words[0].startswith("file="):
        ast.parse(source, str(block.page))
        (modules_dir / block.words[0].removeprefix("file=")).write_text(block.text)
        return
    code = compile(source, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, scope))
    else:
        exec(code, scope)


@pytest.mark.cluster
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_blocks_of_the_page_run(
    page: Path, place: Path, modules_dir: Path, shared_cluster: LocalRolloutCluster
) -> None:
    with Client(shared_cluster, set_as_default=False) as client:
        scope: dict[str, Any] = {"__name__": "block", "client": client, "my_tool": my_tool}
        for block in blocks_of(page):
            if block.language == "python":
                execute(block, scope, modules_dir)


def test_few_blocks_do_not_run_and_each_says_why() -> None:
    skipped = [block for block in blocks("python") if block.reason_not_to_run is not None]
    assert [block.name for block in skipped if len(block.reason_not_to_run or "") < 10] == []
    assert len(skipped) <= 1


def test_an_unknown_word_behind_python_is_refused() -> None:
    known = [b for b in blocks("python") if not b.words or b.words[0] == "no-run:" or b.words[0][:5] == "file="]
    assert [block.name for block in blocks("python") if block not in known] == []


def test_an_error_in_a_block_is_seen(tmp_path: Path) -> None:
    wrong = Block(ROOT / "README.md", 7, "python", (), "assert 1 == 2\n")
    with pytest.raises(AssertionError):
        execute(wrong, {}, tmp_path)
