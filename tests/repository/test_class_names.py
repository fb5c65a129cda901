"""One class name, one meaning: no two modules of the package define a public class of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "heddle_dask"


def test_each_public_class_name_exists_once() -> None:
    places = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
