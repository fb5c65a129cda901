"""``heddle bench``: says where the measurements are."""

from __future__ import annotations

from typing import NoReturn

import click

from heddle_dask.core.errors import BadInput


@click.command(
    "bench",
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def bench(words: tuple[str, ...]) -> NoReturn:
    """Say where the measurements are."""
    name = words[0] if words and not words[0].startswith("-") else "NAME"
    raise BadInput(
        f"measurements are in a checkout, not in the package: `python -m benchmarks {name} …` there"
    )
