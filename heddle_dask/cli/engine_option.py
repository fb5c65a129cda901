"""``--engine``: a kind of the registry, or one of the user's own modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import click

from heddle_dask.cli.shared_options import F
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.kinds import ENGINE_KINDS, engine_kind


def engine_option(default: str, *others: str) -> Callable[[F], F]:
    """The option, checked when the command line is read.

    Parameters
    ----------
    default
        Its default.
    others
        Names that the command takes besides those of engine kinds.
    """
    named = ", ".join((*ENGINE_KINDS, *others, "package.module:object"))

    def checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
        if value in others or value in ENGINE_KINDS:
            return value
        if ":" not in value:
            raise BadInput(f"--engine {value}: use {named}")
        import_from_here()
        engine_kind(value)
        return value

    return click.option(
        "--engine", default=default, show_default=True, callback=checked, help=f"Kind of engine: {named}."
    )


def import_from_here() -> str:
    """Let modules of the working directory be imported, as ``python -m`` does; returns the directory."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    return here
