"""The fenced blocks of the documentation's Markdown pages, by language and by the words behind it.

```python              runs as a test, after the blocks before it on its page
```python no-run: why  does not
```python file=x.py    likewise, and is saved for the blocks after it; with `run-by: tests/…` that test runs it
```toml cluster        is read by the loader of that word (`tests/docs/test_toml_blocks.py`)
```bash                likewise, by bash; its lines that call `heddle` or `benchmarks` are parsed too
```bash no-run: why    is parsed only
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("*/*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


_COMMANDS = re.compile(
    r"^ *(?:[\w./-]*/)?((?:heddle|python -m benchmarks) [a-z][^\n]*)$|`((?:heddle|python -m benchmarks) [a-z][^`]*)`",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes
    ----------
    line
        Number of its first line of text in the page.
    words
        What follows the language.
    """

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        """Page and line, for the id of a test."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def reason_not_to_run(self) -> str | None:
        """What follows `no-run:`, or None where it is to run."""
        if not self.words or not self.words[0].startswith("no-run"):
            return None
        return " ".join(self.words[1:])

    @property
    def run_by(self) -> str | None:
        """The test that runs this file, which takes too long or needs too much here; None: it runs here."""
        return self.words[2] if self.words[1:2] == ("run-by:",) else None


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of one page, in their order."""
    content = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(content):
        language, *words = found["info"].split() or [""]
        line = content.count("\n", 0, found.start("text")) + 1
        yield Block(page, line, language, tuple(words), textwrap.dedent(found["text"]))


def blocks(language: str, word: str | None = None) -> list[Block]:
    """The blocks of all pages in that language, or those of them with that first word."""
    found = [block for page in PAGES for block in blocks_of(page) if block.language == language]
    return found if word is None else [block for block in found if block.words[:1] == (word,)]


def indented_blocks(page: Path) -> list[str]:
    """First lines of the blocks that are indented and not fenced."""
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"(?:\A|\n\n) {4}(?! )(?![-*|\d])([^\n]*)", prose)


def heddle_commands(page: Path) -> list[tuple[int, str]]:
    """Line number and text of every command line of a page that calls `heddle` or `benchmarks`.

    In fenced blocks, in indented ones, and in single backticks; lines that end with a backslash go on.
    """
    content = page.read_text(encoding="utf-8")
    joined = re.sub(r"\\\n", lambda _: " \x00", content)
    found = []
    for match in _COMMANDS.finditer(joined):
        before = joined[: match.start()]
        line = before.count("\n") + before.count("\x00") + 1
        command = " ".join((match[1] or match[2]).replace("\x00", " ").split())
        found.append((line, command))
    return found
