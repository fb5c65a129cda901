"""The Python and shell blocks of docs and README run, in their order on a page, on emulated engines."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from worlds.markdown_blocks import PAGES, ROOT, Block, blocks, blocks_of, indented_blocks
from worlds.shell_blocks import Shell

from heddle_dask import LocalRolloutCluster

WITH_BLOCKS = [page for page in PAGES if any(block.language in ("python", "bash") for block in blocks_of(page))]


def my_tool(text: str) -> str:
    """The tool that blocks call without defining it."""
    return "42"


def execute(block: Block, scope: dict[str, Any], modules_dir: Path, shell: Shell) -> None:
    """Run one block, and save it where it names its file; messages name page and line."""
    if block.reason_not_to_run is not None:
        return
    if block.language == "bash":
        shell.run(block.text)
        return
    if block.words and block.words[0].startswith("file="):
        path = modules_dir / block.words[0].removeprefix("file=")
        path.write_text(block.text)
        if block.run_by is None:
            runpy.run_path(str(path), run_name=path.stem)  # it knows nothing of the blocks before it
        return
    source = "\n" * (block.line - 1) + block.text
    code = compile(source, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, scope))
    else:
        exec(code, scope)


@pytest.mark.cluster
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_the_page_run(
    page: Path, place: Path, modules_dir: Path, shared_cluster: LocalRolloutCluster, model_dir: str
) -> None:
    shell = Shell(place, shared_cluster.scheduler_address, model_dir)
    with Client(shared_cluster, set_as_default=False) as client:
        scope: dict[str, Any] = {"__name__": "block", "client": client, "my_tool": my_tool}
        for block in blocks_of(page):
            if block.language in ("python", "bash"):
                execute(block, scope, modules_dir, shell)


def test_few_python_blocks_do_not_run_and_each_block_that_does_not_says_why() -> None:
    skipped = [
        block for language in ("python", "bash") for block in blocks(language) if block.reason_not_to_run is not None
    ]
    assert [block.name for block in skipped if len(block.reason_not_to_run or "") < 10] == []
    assert sum(block.language == "python" for block in skipped) <= 1
    named = [path for block in skipped for path in re.findall(r"tests/[\w/.]+\.py", block.reason_not_to_run or "")]
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_a_long_program_is_run_by_the_test_that_it_names() -> None:
    programs = [block for block in blocks("python") if block.run_by is not None]
    for block in programs:
        assert block.words[0].removeprefix("file=") in (ROOT / str(block.run_by)).read_text(), block.name
    assert len(programs) <= 3


def test_an_unknown_word_behind_the_language_is_refused() -> None:
    known = [block for block in blocks("python") if not block.words or block.words[0][:5] == "file="]
    known += [block for block in blocks("bash") if not block.words]
    assert [b.name for b in known if len(b.words) > 1 and b.run_by is None] == []
    all_blocks = [*blocks("python"), *blocks("bash")]
    assert [b.name for b in all_blocks if b not in known and b.words[0] != "no-run:"] == []


def test_no_program_is_outside_of_the_blocks_that_run() -> None:
    """Blocks of other languages, and indented ones, would escape."""
    others = {"toml", "yaml", "text", "", "{toctree}", "{eval-rst}"}
    every = [block for page in PAGES for block in blocks_of(page)]
    assert {block.language for block in every} <= {"python", "bash", *others}
    command = re.compile(r"^(\$ )?(heddle|dask|python|pip|make|sh|curl|from|import) [^= ]", re.MULTILINE)
    assert [block.name for block in every if block.language in others and command.search(block.text)] == []
    assert [(page.name, line) for page in PAGES for line in indented_blocks(page)] == []


def test_an_error_in_a_block_is_seen(tmp_path: Path) -> None:
    wrong = Block(ROOT / "README.md", 7, "python", (), "assert 1 == 2\n")
    shell = Shell(tmp_path, "tcp://127.0.0.1:1", "")
    with pytest.raises(AssertionError):
        execute(wrong, {}, tmp_path, shell)
    for text, said in (
        ("false\necho on", "^$"),
        ("heddle show nowhere.zarr", "nowhere.zarr"),
        ("nosuch program", "nosuch"),
        ("if", "syntax error"),
    ):
        with pytest.raises(AssertionError, match=said):
            execute(Block(ROOT / "README.md", 7, "bash", (), text), {}, tmp_path, shell)
