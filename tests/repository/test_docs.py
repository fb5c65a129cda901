"""The documentation holds together: links resolve, every page is reachable, named files and classes exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    assert [name_of(page) for page in DOCS.rglob("*") if page.is_file() and page not in seen] == []


def test_the_readme_links_the_index() -> None:
    assert INDEX in {target for target, _ in links_of(ROOT / "README.md")}


# -- pages that name code ---------------------------------------------------------------------------------

PACKAGE = ROOT / "heddle_dask"
OF_CODE = [DOCS / "architecture.md", DOCS / "glossary.md"]


@pytest.mark.parametrize("page", OF_CODE, ids=name_of)
def test_every_path_that_the_page_names_exists(page: Path) -> None:
    named = re.findall(r"`([\w./]+(?:\.\w+|/))`", prose_of(page))
    paths = {name for name in named if "/" in name}
    assert len(paths) >= 20
    assert [name for name in sorted(paths) if not ((PACKAGE / name).exists() or (ROOT / name).exists())] == []


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
