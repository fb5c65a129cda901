"""The documentation holds together: links resolve, every page is reachable, named files, classes and options exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from heddle_dask.strategies.presets import PARTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
SECTIONS = [DOCS / f"{name}.md" for name in ("tutorials", "how-to", "reference", "explanation")]
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


def test_a_section_of_the_index_links_every_page_of_docs() -> None:
    assert set(SECTIONS) <= {target for target, _ in links_of(INDEX)}
    linked = {target for section in SECTIONS for target, _ in links_of(section)}
    pages = set(DOCS.glob("*.md")) - {INDEX, *SECTIONS}
    assert sorted(map(name_of, pages - linked)) == []


def test_every_file_of_docs_is_reachable_from_the_index() -> None:
    seen, open_pages = {INDEX}, [INDEX]
    while open_pages:
        for target, _ in links_of(open_pages.pop()):
            if target.suffix == ".md" and target not in seen and target.exists():
                seen.add(target)
                open_pages.append(target)
            elif target.suffix == ".ipynb":
                seen.add(target)
    pages = [page for page in DOCS.rglob("*") if page.suffix in (".md", ".ipynb")]
    assert [name_of(page) for page in pages if page not in seen] == []


def test_the_readme_links_the_index() -> None:
    assert INDEX in {target for target, _ in links_of(ROOT / "README.md")}


# -- pages that name code ---------------------------------------------------------------------------------

PACKAGE = ROOT / "heddle_dask"
OF_TODAY = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FOLDERS = {path.name for folder in (ROOT, PACKAGE) for path in folder.iterdir() if path.is_dir()} - {"runs"}


@pytest.mark.parametrize("page", OF_TODAY, ids=name_of)
def test_every_path_that_the_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`([\w.]+/[\w./]*)(?:::\w+)?`", prose_of(page)))
    paths = {path for path in named if path.partition("/")[0] in FOLDERS}
    assert [path for path in sorted(paths) if not ((PACKAGE / path).exists() or (ROOT / path).exists())] == []


def test_the_architecture_page_names_the_files_and_the_methods_of_the_walk() -> None:
    text = prose_of(DOCS / "architecture.md")
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(named) >= 50
    assert [path for path in sorted(named) if not (PACKAGE / path).exists()] == []
    methods = [name for name in re.findall(r"`(\w+\.\w+)`", text) if name.partition(".")[0] in members_of_classes()]
    assert len(set(methods)) >= 50


def test_the_architecture_page_has_at_most_three_thousand_words() -> None:
    assert len((DOCS / "architecture.md").read_text(encoding="utf-8").split()) <= 3000


def test_the_documentation_has_at_most_seventy_five_thousand_words() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in DOCS.rglob("*.md")) <= 75_000


@cache
def members_of_classes() -> dict[str, set[str]]:
    """Methods and attributes of each class of the package, with those of its base classes in the package."""
    own: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                own.setdefault(node.name, set()).update(members_of(node))
                bases.setdefault(node.name, []).extend(name_of_base(base) for base in node.bases)

    def inherited(name: str) -> set[str]:
        return own.get(name, set()).union(*(inherited(base) for base in bases.get(name, [])))

    return {name: inherited(name) for name in own}


def members_of(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.AnnAssign | ast.Assign):
            for target in [each.target] if isinstance(each, ast.AnnAssign) else each.targets:
                if isinstance(target, ast.Name):
                    yield target.id
                elif isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr


def name_of_base(base: ast.expr) -> str:
    return ast.unparse(base.value if isinstance(base, ast.Subscript) else base)


@pytest.mark.parametrize("page", OF_TODAY, ids=name_of)
def test_every_method_that_the_page_names_exists(page: Path) -> None:
    classes = members_of_classes()
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)[`(]", prose_of(page)))
    # `Client` and the like are other packages' classes.
    unknown = {f"{owner}.{member}" for owner, member in named if member not in classes.get(owner, {member})}
    assert sorted(unknown) == []


def test_the_architecture_page_names_only_classes_of_the_package() -> None:
    named = set(re.findall(r"`([A-Z][a-z]+\w*)\.\w+[`(]", prose_of(DOCS / "architecture.md")))
    assert sorted(named - set(members_of_classes()) - {"Client"}) == []


def test_every_owner_in_the_glossary_is_in_its_file() -> None:
    owners = re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", (DOCS / "glossary.md").read_text(encoding="utf-8"))
    assert len(owners) >= 40
    defined = r"^(?:class|def|async def) {0}\b|^{0}\b.*="
    texts = {path: (PACKAGE / path).read_text(encoding="utf-8") for _, path in owners}
    missing = [
        f"{name} in {path}" for name, path in owners if not re.search(defined.format(name), texts[path], re.MULTILINE)
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
    rows = [row for row in re.findall(r"^\| `([\w-]+)` \|(.*?)\|", section, re.MULTILINE) if row[0] in PARTS[part]]
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
    assert {name: option_value(default) for name, default in told.items()} == {name: known[name] for name in told}


def option_value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def test_every_image_is_shown_on_a_page() -> None:
    shown = {target for page in PAGES for target, _ in links_of(page)}
    assert [name_of(image) for image in (DOCS / "images").iterdir() if image not in shown] == []
