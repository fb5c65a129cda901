"""The stored inventories of other projects name things that exist there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from worlds.markdown_blocks import DOCS

INVENTORIES = sorted((DOCS / "_inventories").glob("*.inv"))


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda path: path.name)
def test_every_name_can_be_imported(path: Path) -> None:
    head, project, _, *lines = path.read_text(encoding="utf-8").splitlines()
    assert head == "# Sphinx inventory version 1"
    assert project.startswith("# Project: ")
    assert lines
    for line in lines:
        name, kind, location = line.split()
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module or "builtins"), attribute), name
        assert kind in ("function", "class")
        assert location.endswith(".html")
