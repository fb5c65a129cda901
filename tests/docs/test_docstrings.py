"""Docstrings of everything that the API pages describe follow numpydoc, as far as this project does.

Not asked for: a description of each parameter and of each returned value, since signatures have types and names, and a
docstring says what they do not; examples; "See Also".
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from typing import Any

import pytest
from worlds.markdown_blocks import DOCS

validate = pytest.importorskip("numpydoc.validate").validate

# Sections exist and are in order, there is a summary of one sentence, and described parameters exist, in their order.
CODES = {
    "GL03",
    "GL06",
    "GL07",
    "GL08",
    "GL09",
    "SS01",
    "SS02",
    "SS03",
    "SS04",
    "PR02",
    "PR03",
    "PR05",
    "PR10",
}


def described() -> list[str]:
    """The names on the API pages."""
    pages = (page.read_text(encoding="utf-8") for page in sorted((DOCS / "api").glob("*.md")))
    return [name for page in pages for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)$", page, re.MULTILINE)]


def found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@cache
def members(name: str) -> tuple[str, ...]:
    """The object, and where it is a class its public methods and properties, by the module that defines them."""
    thing = found(name)
    place = f"{thing.__module__}.{thing.__qualname__}"
    if not inspect.isclass(thing):
        return (place,)
    own = [
        member
        for member, value in vars(thing).items()
        if not member.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod))
    ]
    return (place, *(f"{place}.{member}" for member in own))


@pytest.mark.parametrize("name", described())
def test_the_docstrings_follow_numpydoc(name: str) -> None:
    wrong = [
        f"{member}: {code} {text}"
        for member in members(name)
        for code, text in validate(member)["errors"]
        if code in CODES
    ]
    assert wrong == []


def test_the_pages_describe_the_public_api() -> None:
    assert len(described()) >= 60
    assert sum(len(members(name)) for name in described()) >= 150
