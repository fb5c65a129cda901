"""The documentation holds together: links resolve, every page is reachable, named files, classes and options exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from heddle_dask.strategies.presets import PARTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])


def prose_of(page: Path) -> str:
    """The page without its code blocks, which may hold what looks like a heading or a link."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def links_of(page: Path) -> Iterator[tuple[Path, str]]:
    """Target file and anchor of every relative link."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


def anchors_of(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_resolves(page: Path) -> None:
    broken = [
        f"{target}#{anchor}"
        for target, anchor in links_of(page)
        if not target.exists() or (anchor and anchor not in anchors_of(target))
    ]
    assert broken == []


def test_the_index_links_every_page_of_docs() -> None:
    linked = {target for target, _ in links_of(INDEX)}
    missing = [name_of(page) for page in DOCS.glob("*.md") if page != INDEX and page not in linked]
    assert missing == []


def test_every_file_of_docs_is_reachable_from_the_index() -> None:
    seen, open_pages = {INDEX}, [INDEX]
    while open_pages:
        for target, _ in links_of(open_pages.pop()):
            if target.suffix == ".md" and target not in seen and target.exists():
                seen.add(target)
                open_pages.append(target)
    assert [name_of(page) for page in DOCS.rglob("*.md") if page not in seen] == []


def test_the_readme_links_the_index() -> None:
    assert INDEX in {target for target, _ in links_of(ROOT / "README.md")}


# -- pages that name code ---------------------------------------------------------------------------------

PACKAGE = ROOT / "heddle_dask"
# Experiments name files of their time.
OF_TODAY = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((DOCS / "decisions").glob("*.md"))]
FOLDERS = {path.name for folder in (ROOT, PACKAGE) for path in folder.iterdir() if path.is_dir()} - {"runs"}


@pytest.mark.parametrize("page", OF_TODAY, ids=name_of)
def test_every_path_that_the_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`([\w.]+/[\w./]*)(?:::\w+)?`", prose_of(page)))
    paths = {path for path in named if path.partition("/")[0] in FOLDERS}
    assert [path for path in sorted(paths) if not ((PACKAGE / path).exists() or (ROOT / path).exists())] == []


def test_the_architecture_page_names_the_files_of_the_walk() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", prose_of(DOCS / "architecture.md")))
    assert len(named) >= 30
    assert [path for path in sorted(named) if not (PACKAGE / path).exists()] == []


def test_every_owner_in_the_glossary_is_in_its_file() -> None:
    owners = re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", (DOCS / "glossary.md").read_text(encoding="utf-8"))
    assert len(owners) >= 40
    defined = r"^(?:class|def|async def) {0}\b|^{0}\b.*="
    texts = {path: (PACKAGE / path).read_text(encoding="utf-8") for _, path in owners}
    missing = [
        f"{name} in {path}"
        for name, path in owners
        if not re.search(defined.format(name), texts[path], re.MULTILINE)
    ]
    assert missing == []


def test_the_glossary_has_each_term_once() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^- \*\*(.+?)\*\*:", text, re.MULTILINE)
    assert len(terms) == len(set(terms)) >= 60


@pytest.mark.parametrize("part", PARTS)
def test_the_page_of_strategies_has_every_name_and_option_of_a_part(part: str) -> None:
    text = (DOCS / "strategies.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {part.capitalize()}\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    rows = [
        row for row in re.findall(r"^\| `([\w-]+)` \|(.*?)\|", section, re.MULTILINE) if row[0] in PARTS[part]
    ]
    assert [name for name, _ in rows] == list(PARTS[part])
    for name, options in rows:
        known = {field.name: field.default for field in fields(PARTS[part][name])}
        for option, default in re.findall(r"`(\w+)(?:=([^`]*))?`", options):
            assert option in known, (name, option)
            assert default == "" or known[option] == option_value(default), (name, option)


def test_the_table_of_kv_fit_has_its_options_and_their_defaults() -> None:
    text = (DOCS / "strategies.md").read_text(encoding="utf-8")
    table = text.partition("Options of `kv-fit`:\n\n")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]*?)`? \|", table, re.MULTILINE))
    known = {field.name: field.default for field in fields(PARTS["admission"]["kv-fit"]) if field.init}
    assert set(told) <= set(known)
    assert {name: option_value(default) for name, default in told.items()} == {
        name: known[name] for name in told
    }


def option_value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
