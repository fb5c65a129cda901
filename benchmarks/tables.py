"""What studies share: rows of one arm, their tables, names by commas, and spreads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import click

from benchmarks.code_digest import code_digest
from heddle_dask.cli.shared_options import print_json
from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Column = tuple[str, Callable[[Any], str]]
"""The head of a column, and the text of a row in it."""


@dataclass(frozen=True, slots=True)
class ExperimentRow:
    """One arm of one experiment over its seeds; a study adds what it measures.

    Attributes
    ----------
    ratio
        To the arm that it is compared with, as the study defines it, or what `note` says; 0: none.
    ratio_least, ratio_most
        Least and largest ratio over seeds, or over swept constants.
    paper_ratio
        What the paper reports; empty: nothing comparable.
    seeds
        Seeds that were measured.
    note
        Conditions that the other fields do not name.
    """

    COLUMNS: ClassVar[Sequence[Column]] = ()

    experiment: str
    arm: str
    ratio: float = field(default=0.0, kw_only=True)
    ratio_least: float = field(default=0.0, kw_only=True)
    ratio_most: float = field(default=0.0, kw_only=True)
    paper_ratio: str = field(default="", kw_only=True)
    seeds: int = field(default=1, kw_only=True)
    note: str = field(default="", kw_only=True)

    def as_json(self) -> dict[str, Any]:
        """A JSON-able row, rounded."""
        return {name: rounded(value) for name, value in asdict(self).items()}


def rounded(value: Any) -> Any:
    """A JSON-able value with its floats rounded, inside mappings too."""
    if isinstance(value, float):
        return round(value, 4)
    return {key: rounded(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def ratio_fields(ratios: Sequence[float]) -> dict[str, Any]:
    """The three fields of ratios over seeds: their mean, the least and the largest; without any, none."""
    if not ratios:
        return {}
    return {"ratio": statistics.fmean(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios)}


def experiment_tables(rows: Iterable[ExperimentRow]) -> list[str]:
    """Markdown lines: a table for each experiment, in order of their first rows, of the columns that it uses."""
    by_experiment: dict[str, list[ExperimentRow]] = {}
    for row in rows:
        by_experiment.setdefault(row.experiment, []).append(row)
    lines: list[str] = []
    for experiment, mine in by_experiment.items():
        columns = mine[0].COLUMNS
        cells = [[text(row) for _, text in columns] for row in mine]
        used = [n for n in range(len(columns)) if any(line[n] for line in cells)]
        heads = [columns[n][0] for n in used]
        lines += titled_table(experiment, heads, [[line[n] for n in used] for line in cells])
    return lines


def print_rows(rows: Iterable[DataclassInstance], columns: Sequence[Column], *, err: bool) -> list[Any]:
    """Print rows as they are made, on stdout or stderr; returns them in JSON-able form."""
    made: list[Any] = []
    for row in rows:
        if not made:
            for line in markdown([head for head, _ in columns], []):
                click.echo(line, err=err)
        made.append(asdict(row))
        click.echo("| " + " | ".join(text(row) for _, text in columns) + " |", err=err)
    return made


def print_measured_rows(
    rows: Iterable[DataclassInstance], columns: Sequence[Column], *, as_json: bool, **more: Any
) -> None:
    """Print rows as they are made; with `as_json` on stderr, and all of them, with `more`, as the last line."""
    made = print_rows(rows, columns, err=as_json)
    if as_json:
        print_measured({"rows": made, **more})


def print_measured(result: Mapping[str, Any]) -> None:
    """Print the last line of stdout, with the digest of the code that was measured as ``code``."""
    print_json({**result, "code": code_digest()})


def titled_table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table with a heading above it; nothing without lines."""
    if lines:
        yield from ("", f"### {title}", "", *markdown(heads, lines))


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table."""
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for line in lines:
        yield "| " + " | ".join(line) + " |"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median (least-most); the value alone where there is one."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):,.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def names(text: str) -> list[str]:
    """The names that a text has, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def chosen(
    option: str, text: str, known: Sequence[str], groups: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """Those of the known names that an option names by commas, in their own order.

    Parameters
    ----------
    groups
        Names that stand for several ones.

    Raises
    ------
    BadInput
        It names none, or an unknown one.
    """
    groups = groups or {}
    wanted = names(text)
    for name in wanted:
        if name not in known and name not in groups:
            raise BadInput(f"{option} {text}: unknown '{name}'; choose from {', '.join((*groups, *known))}")
    named = {*wanted, *(each for name in wanted for each in groups.get(name, ()))}
    found = [name for name in known if name in named]
    if not found:
        raise BadInput(f"{option} {text!r} names nothing that is there: give one or more, separated by commas")
    return found
