"""The documentation site builds without warnings and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from worlds.markdown_blocks import DOCS, ROOT

pytest.importorskip("sphinx")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that the docs stage of `make test` has built; else one without the notebook's output."""
    if "HEDDLE_SITE" in os.environ:
        return Path(os.environ["HEDDLE_SITE"])
    out = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-E", "-c", "docs", "-b", "html"]
    done = subprocess.run(
        [*argv, "-D", "nb_execution_mode=off", ".", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out


class Loaded(HTMLParser):
    """Addresses that a browser fetches by itself when it opens a page, and the pages' own links."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "a":
            self.links.append(values.get("href", ""))
        elif tag == "link" and values.get("rel") not in ("canonical", "search", "next", "prev"):
            self.loaded.append(values.get("href", ""))
        elif tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "object"):
            self.loaded += [values[name] for name in ("src", "srcset", "data", "poster") if name in values]


def loaded_by(page: Path) -> Loaded:
    parser = Loaded()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


def pages_of(site: Path) -> list[Path]:
    """The pages; the theme keeps templates among its static files."""
    return [page for page in site.rglob("*.html") if "_static" not in page.parts]


def is_elsewhere(address: str) -> bool:
    return re.match(r"(?:[a-z][a-z0-9+.-]*:)?//", address) is not None


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = pages_of(site)
    assert len(pages) >= 60
    assert {(page.name, to) for page in pages for to in loaded_by(page).loaded if is_elsewhere(to)} == set()


def test_no_style_sheet_loads_anything_from_another_host(site: Path) -> None:
    sheets = list(site.rglob("*.css"))
    assert sheets
    found = [
        (sheet.name, to)
        for sheet in sheets
        for to in re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)", sheet.read_text(encoding="utf-8"))
        if is_elsewhere("".join(to))
    ]
    assert found == []


def test_every_file_that_a_page_loads_or_links_is_in_the_site(site: Path) -> None:
    missing = set()
    for page in pages_of(site):
        parser = loaded_by(page)
        for address in {*parser.loaded, *parser.links}:
            path = re.split(r"[?#]", address)[0]
            if path and not re.match(r"[a-z]+:|//", address) and not (page.parent / path).exists():
                missing.add((page.name, address))
    assert missing == set()


def test_every_page_of_docs_is_in_the_site(site: Path) -> None:
    pages = [page.relative_to(ROOT).with_suffix(".html") for page in DOCS.rglob("*.md")]
    assert [str(page) for page in pages if not (site / page).exists()] == []


def test_every_public_name_is_described(site: Path) -> None:
    import heddle_dask

    text = "".join(page.read_text(encoding="utf-8") for page in (site / "docs" / "api").glob("*.html"))
    assert [name for name in heddle_dask.__all__ if f'id="heddle_dask.{name}"' not in text] == []


def test_every_command_is_described(site: Path) -> None:
    from heddle_dask.cli.main import heddle

    text = (site / "docs" / "cli-options.html").read_text(encoding="utf-8")
    shown = [name for name, command in heddle.commands.items() if not command.hidden]
    assert [name for name in shown if f'id="heddle-{name}"' not in text] == []


def test_a_load_from_another_host_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<script src="https://cdn.example.org/x.js"></script><img src="//example.org/badge.svg">')
    assert [is_elsewhere(to) for to in loaded_by(page).loaded] == [True, True]
