"""Every command line of the pages that calls `heddle` or `benchmarks` names commands and options that exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from itertools import pairwise
from pathlib import Path

import click
import pytest
from worlds.markdown_blocks import PAGES, ROOT, blocks, heddle_commands

from benchmarks.command import bench
from heddle_dask.cli.main import heddle


def parsed(command: str) -> None:
    """Parse one command line as click does, without calling back or converting anything."""
    # What is left out, a placeholder in brackets, a comment, a pipe.
    text = re.sub(r"…|\.\.\. |\.\.\.$|\[[^\]]*\]|#.*|[|>&;].*", " ", command)
    program, *words = shlex.split(text)
    found: click.Command = heddle
    if program == "python":
        found, words = bench, words[2:]
    elif words[:1] == ["bench"]:
        raise click.UsageError("measurements are `python -m benchmarks NAME`")
    context = click.Context(found, info_name=found.name)
    while words and isinstance(found, click.Group) and not words[0].startswith("-"):
        child = found.get_command(context, words[0])
        if child is None:
            raise click.UsageError(f"no command {words[0]!r}")
        found, words = child, words[1:]
        context = click.Context(found, info_name=found.name, parent=context)
    words = [word for word in words if not word.startswith("$")]
    try:
        found.make_parser(context).parse_args(list(words))
    except click.BadOptionUsage as error:
        if not error.message.endswith("requires an argument."):
            raise
        # A sentence names an option without a value.
        found.make_parser(context).parse_args([*words, "VALUE"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_of_the_page_exists(page: Path) -> None:
    wrong = []
    for line, command in heddle_commands(page):
        try:
            parsed(command)
        except (click.UsageError, ValueError) as error:
            wrong.append(f"line {line}: {command}: {error}")
    assert wrong == []


def test_the_pages_hold_command_lines() -> None:
    assert sum(len(heddle_commands(page)) for page in PAGES) >= 40


@pytest.mark.parametrize(
    "command",
    [
        "heddle rollout --no-such-option 3",
        "heddle nonsense",
        "python -m benchmarks nonsense",
        "python -m benchmarks overhead --no-such-option",
        "heddle bench overhead",
        "heddle show RUN --trajectorie",
    ],
)
def test_a_wrong_command_line_is_noticed(command: str) -> None:
    with pytest.raises(click.UsageError):
        parsed(command)


# -- lines that call something else ---------------------------------------------------------------------------

NEVER_RUN = {
    "pip": "it installs; `make rollout` and tests/repository/test_install.py do it",
    "hf": "it downloads a model",
    "ssh": "another machine",
    "salloc": "a SLURM site",
    "module": "a site's modules",
    "openssl": "tests make their own certificates",
    "chmod": "belongs to openssl's files",
}
"""Programs of others that shell blocks call, and why no test runs them."""

RUN_ELSEWHERE = {
    "docs/slurm.md": "tests/slurm",
    "docs/training-data.md": "",
    "docs/training.md": "",
    "docs/security.md": "",
}
"""Pages with blocks of whole shell programs: parsed by bash, those of SLURM run by the tests of that folder."""


def lines_of_others() -> list[tuple[str, str]]:
    """Page and line of every command in a shell block that is neither ours nor an option of one before it."""
    found = []
    for block in blocks("bash"):
        page = str(block.page.relative_to(ROOT))
        text = re.sub(r"\\\n", " ", block.text)
        for line in text.splitlines():
            words = line.partition("#")[0].strip()
            if (
                words
                and not re.match(r"(?:[\w./-]*/)?heddle |python -m benchmarks ", words)
                and page not in RUN_ELSEWHERE
            ):
                found.append((page, words))
    return found


@pytest.mark.parametrize(("page", "line"), lines_of_others())
def test_every_other_line_of_a_shell_block_names_what_exists(page: str, line: str) -> None:
    program, *words = shlex.split(line)
    if program in NEVER_RUN:
        return
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "dask":
        preloads = [word for before, word in pairwise(words) if before == "--preload"]
        assert preloads and all(importlib.util.find_spec(preload) for preload in preloads)
    elif program == "sh":
        assert (ROOT / words[0]).is_file()
    else:
        assert (program, words[0]) == ("python", "-m") and importlib.util.find_spec(words[1])
