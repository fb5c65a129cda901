"""Strategies of other packages, named ``package.module:Class``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import is_dataclass

from heddle_dask.core.errors import BadInput

_METHODS = {
    "placement": ("choose_engine",),
    "scheduling": ("priority",),
    "preemption": ("victim",),
    "migration": ("propose", "choose"),
    "admission": ("admit",),
    "actions": ("allocate",),
}


def is_imported(name: str) -> bool:
    """Whether the name of a strategy says a module to import."""
    return ":" in name


def imported_names(overrides: Sequence[str]) -> list[str]:
    """The names in overrides that would be imported: ``package.module:Class``."""
    names = (text.partition(",")[0].partition("=")[2] for text in overrides)
    return [name for name in names if is_imported(name)]


def imported_strategy(part: str, name: str) -> type:
    """The class that `name` says, which is a dataclass with the methods of its part (`heddle_dask.core.view`).

    Raises
    ------
    BadInput
        It cannot be imported, or is no strategy of this part.
    """
    if part not in _METHODS:
        raise BadInput(f"{part} '{name}': a {part} cannot be imported; choose one of this package")
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    # A module may raise anything during its import.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise BadInput(f"{part} '{name}' cannot be imported in this process: {told}") from error
    if not isinstance(found, type) or not is_dataclass(found):
        raise BadInput(f"{part} '{name}' is no dataclass: its fields are the options")
    missing = [method for method in _METHODS[part] if not callable(getattr(found, method, None))]
    if missing:
        raise BadInput(f"{part} '{name}' has no method '{missing[0]}': see heddle_dask/core/view.py")
    return found
