"""Every command line of the pages that calls `heddle` or `benchmarks` names commands and options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from worlds.markdown_blocks import PAGES, ROOT, heddle_commands

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
