"""Stands for what verifiers imports of hosted services and graders: nothing of it is used where programs run here."""

from __future__ import annotations

from pathlib import Path

_HOLLOW = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""
PARTS = {
    "prime_sandboxes/__init__.py": "",
    "prime_sandboxes/models.py": "def validate_egress_lists(*lists, **named):\n    return None\n",
    "math_verify/__init__.py": _HOLLOW,
    "math_verify/errors.py": _HOLLOW,
    "prime_runs/__init__.py": _HOLLOW,
    "prime_runs/projection.py": _HOLLOW,
    "prime_tunnel/__init__.py": _HOLLOW,
}


def parts_of_verifiers(folder: Path) -> Path:
    """A folder for the import path, beside that of the wheels."""
    for name, text in PARTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
