"""Studies with many experiments by name: each makes rows of its arms, with the same runner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from benchmarks.code_digest import DECIDING, code_digest
from benchmarks.runner import KeptRows, Runner, runner_of
from benchmarks.tables import ExperimentRow, chosen, experiment_tables, print_measured

_STUDIES = ("actions", "opponents", "rollart")
"""Where what these experiments simulate is written."""


@dataclass(frozen=True, slots=True)
class Study:
    """What experiments have in common.

    Attributes
    ----------
    seeds
        Seeds that are reported.
    model
        Directory with a tokenizer, for experiments that measure this machine.
    """

    runner: Runner
    seeds: Sequence[int]
    model: str = ""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment.

    Attributes
    ----------
    about
        What it measures, in a line.
    simulated
        Whether it runs in virtual time; otherwise it measures this machine.
    """

    about: str
    rows: Callable[[Study], Sequence[ExperimentRow]]
    simulated: bool = True


def experiment(measure: Callable[..., Sequence[Any]], **options: object) -> Experiment:
    """An experiment in virtual time, described by the first line of its docstring."""
    about = (measure.__doc__ or "").splitlines()[0]
    return Experiment(about, lambda study: measure(study, **options))


@dataclass(frozen=True, slots=True)
class Experiments:
    """All experiments of a study.

    Attributes
    ----------
    groups
        Names that stand for several.
    folders
        Of the package, on which the rows depend.
    """

    by_name: Mapping[str, Experiment]
    groups: Mapping[str, Collection[str]] = field(default_factory=dict)
    folders: tuple[str, ...] = DECIDING

    def chosen(self, text: str) -> list[str]:
        """The experiments that ``--experiment`` names, in their own order.

        Raises
        ------
        BadInput
            It names none, or an unknown one.
        """
        groups = {"all": list(self.by_name), **self.groups}
        return chosen("--experiment", text, list(self.by_name), groups)

    def run(
        self,
        text: str,
        seeds: Sequence[int],
        out: Path | None,
        *,
        as_json: bool,
        scheduler: str | None = None,
        model: Callable[[], str] = str,
        kept: bool = False,
    ) -> None:
        """The body of a command: list the experiments, or run those that are named and print their tables.

        Parameters
        ----------
        model
            Finds the directory with a tokenizer, where an experiment needs it.
        kept
            Tables of the rows in `out`, whatever code made them; nothing runs.
        """
        if text == "list":
            for name, one in self.by_name.items():
                click.echo(f"{name:18}  {one.about}")
            return
        names = self.chosen(text)
        runner = KeptRows(out) if kept and out else runner_of(out, code_digest(self.folders, _STUDIES), scheduler)
        live = any(not self.by_name[name].simulated for name in names)
        rows = self.measured(names, Study(runner, seeds, model() if live else ""))
        for line in experiment_tables(rows):
            click.echo(line, err=as_json)
        if as_json:
            print_measured({"rows": [row.as_json() for row in rows]})

    def measured(self, names: Sequence[str], study: Study) -> list[ExperimentRow]:
        """The rows of these experiments."""
        rows: list[ExperimentRow] = []
        for name in names:
            study.runner.say(f"{name} …")
            rows += self.by_name[name].rows(study)
        return rows
