"""What benchmarks of several experiments share: which are chosen, their rows as JSON, and a table for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from heddle_dask.core.errors import BadInput


class ExperimentRow(Protocol):
    """A row of one experiment."""

    @property
    def experiment(self) -> str:
        """Its name."""


Row = TypeVar("Row", bound=ExperimentRow)


def chosen_experiments(
    text: str, experiments: Sequence[str], groups: Mapping[str, Collection[str]]
) -> list[str]:
    """The experiments that ``--experiment`` names by commas, in their own order.

    Parameters
    ----------
    groups
        Names that stand for several experiments.

    Raises
    ------
    BadInput
        It names none, or an unknown one.
    """
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in experiments and name not in groups:
            listed = ", ".join((*groups, *experiments))
            raise BadInput(f"--experiment {text!r}: unknown '{name}'; choose from {listed}")
    named = {*wanted, *(each for name in wanted for each in groups.get(name, ()))}
    found = [name for name in experiments if name in named]
    if not found:
        raise BadInput(f"--experiment {text!r} names nothing that is there: see --experiment list")
    return found


def rounded(value: Any) -> Any:
    """A JSON-able value with its floats rounded, inside mappings too."""
    if isinstance(value, float):
        return round(value, 4)
    return {key: rounded(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def experiment_tables(
    rows: Iterable[Row],
    columns: Sequence[str],
    cells_of: Callable[[Row], Sequence[str]],
    *,
    drop_empty: bool = False,
) -> list[str]:
    """Markdown lines: a table for each experiment, in order of their first rows.

    Parameters
    ----------
    drop_empty
        Leave columns out in which no row of the experiment has anything.
    """
    by_experiment: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        by_experiment.setdefault(row.experiment, []).append(cells_of(row))
    lines: list[str] = []
    for experiment, listed in by_experiment.items():
        used = [n for n in range(len(columns)) if not drop_empty or any(cells[n] for cells in listed)]
        lines += ["", f"### {experiment}", "", _line(columns[n] for n in used), _line("---" for _ in used)]
        lines += [_line(cells[n] for n in used) for cells in listed]
    return lines


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
