"""What all commands share: types of numbers, ``--json``, ``--seed``, ``--config``, and files that options name."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from heddle_dask.core.errors import BadInput
from heddle_dask.core.toml_table import read_toml, unknown_key

MOST = 10_000_000
"""The largest count: more trajectories, engines or repeats than one machine could hold."""
_MOST_TOKENS = 2**31 - 1
_MOST_SEED = 2**63 - 1


class WholeNumber(click.IntRange):
    name = "whole number"

    def __init__(self, least: int, most: int = MOST) -> None:
        super().__init__(min=least, max=most)


class CountOrSet(click.ParamType):
    """A number of tasks, or the path or name of a set of tasks."""

    name = "count or set"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.strip() and not value.strip().lstrip("+-").replace(".", "").isdecimal():
            return value
        return COUNT.convert(value, param, ctx)


class FiniteNumber(click.FloatRange):
    """A number in a range; neither nan nor infinite."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


COUNT = WholeNumber(1)
COUNT_OR_SET = CountOrSet()
TOKENS = WholeNumber(2, _MOST_TOKENS)
SEED = WholeNumber(0, _MOST_SEED)
# Seconds and factors: 1e9 seconds are 31 years.
POSITIVE = FiniteNumber(min=0, max=1e9, min_open=True)
NOT_NEGATIVE = FiniteNumber(min=0, max=1e9)


F = TypeVar("F", bound=Callable[..., Any])


def in_order(options: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    """The options in this order, as one decorator."""

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def shared_options(function: F) -> F:
    """Add ``--json``, ``--seed`` and ``--config``."""
    options = [
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="One JSON object on the last line of stdout; everything else goes to stderr.",
        ),
        click.option(
            "--seed",
            type=SEED,
            default=0,
            show_default=True,
            help="Seed of all random draws.",
        ),
        click.option(
            "--config",
            type=click.Path(path_type=Path),
            is_eager=True,
            expose_value=False,
            callback=_take_config,
            help="TOML file whose keys are long options; options given here win.",
        ),
    ]
    add: Callable[[F], F] = in_order(options)
    return add(function)


def print_json(result: Mapping[str, Any]) -> None:
    click.echo(json.dumps(result, allow_nan=False))


def whole_numbers(option: str, text: str, example: str) -> list[int]:
    """Whole numbers separated by commas, in the order given."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise BadInput(f"{option} {text!r}: use whole numbers of at least 1, for example {example}")
    if max(numbers) > MOST:
        raise BadInput(f"{option} {text!r}: use whole numbers of at most {MOST}, for example {example}")
    return numbers


def _take_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Make the file's values the defaults of this command."""
    if path is None:
        return
    options = {
        name[2:]: option
        for option in ctx.command.params
        if isinstance(option, click.Option) and option is not param
        for name in option.opts
        if name.startswith("--")
    }
    defaults: dict[str, Any] = {}
    for key, value in read_toml(path, "--config").items():
        if key not in options:
            raise unknown_key(key, list(options), f"--config {path}")
        option = options[key]
        assert option.name is not None
        defaults[option.name] = _as_given(option, value, f"--config {path}: {key}")
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _as_given(option: click.Option, value: Any, where: str) -> Any:
    """A value as the command line would give it, so that the same checks apply."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise BadInput(f"{where} is {value!r}: use true or false")
        return value
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        return [_text(item, where) for item in values]
    return _text(value, where)


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadInput(f"{where} is {value!r}: use a number or a text")
    return str(value)


def check_writable(option: str, path: Path) -> None:
    """Refuse a path that cannot be written before minutes of work, not after."""
    try:
        # The target of a link: a link to nowhere would otherwise leave an empty file there.
        target = Path(os.path.realpath(path))
        is_new = not target.exists()
        with target.open("a", encoding="utf-8"):
            pass
        if is_new:
            target.unlink()
    except OSError as error:
        raise BadInput(f"{option} {path}: {error.strerror}; give a file that can be written") from None


def write_file(option: str, path: Path, content: str | bytes) -> None:
    """Write the file beside its place and rename it: a reader never sees half of it."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise BadInput(f"{option} {path}: {error.strerror}; give a file that can be written") from None
