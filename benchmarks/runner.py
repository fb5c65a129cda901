"""The runner of all sweeps: cells, arms and seeds become rows of a file, each made once and written as its run ends.

A study says which runs it wants, and what a row is in a line of progress. Later runs may depend on the rows of earlier
ones: it asks again. Tables are made from rows alone (`tables`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from benchmarks.row_file import Row, RowFile
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.runs.progress import duration

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Say = Callable[[str], None]
F = TypeVar("F", bound="DataclassInstance")
J = TypeVar("J", bound="DataclassInstance")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One arm in one cell on one seed.

    Attributes
    ----------
    key
        The fields of its row that name it, its kind among them.
    play
        Makes its figures; plain functions and data, so that it can go to another process.
    """

    key: Row
    play: Callable[[], Row]


class Runner:
    """Makes the rows of runs; those that the file has are not made again.

    Parameters
    ----------
    code
        Digest of the code, for new rows.
    say
        Takes lines of progress.
    scheduler
        Address of the Dask scheduler for the runs, whose workers need a checkout; None: they run in this process.
    """

    def __init__(self, rows: RowFile, code: str, say: Say = print, scheduler: str | None = None) -> None:
        self.rows, self.code, self.say = rows, code, say
        self._scheduler = scheduler

    def played(self, runs: Iterable[SweepRun], told: Callable[[Row], str]) -> list[Row]:
        """The row of each run, in their order.

        Parameters
        ----------
        told
            A new row in a line.
        """
        wanted = list(runs)
        fresh: list[SweepRun] = []
        for run in wanted:
            if self.rows.find(run.key) is None and not any(run.key == other.key for other in fresh):
                fresh.append(run)
        self._play(fresh, told)
        return [row for run in wanted if (row := self.rows.find(run.key)) is not None]

    def row(self, run: SweepRun, told: Callable[[Row], str]) -> Row:
        """The row of one run."""
        (row,) = self.played([run], told)
        return row

    def figures(
        self, figures: type[F], play: Callable[[J], F], jobs: Iterable[J], told: Callable[[J, F], str]
    ) -> list[F]:
        """The figures of jobs, in their order; equal jobs under one version of the code are played once.

        Parameters
        ----------
        figures
            A dataclass of numbers, texts, and mappings and sequences of them; `jobs` are dataclasses too.
        told
            A new job and its figures in a line.
        """
        texts = [(_text(job), job) for job in jobs]
        by_text = dict(texts)
        of = {"kind": "job", "of": figures.__name__, "code": self.code}
        runs = [SweepRun({**of, "job": text}, partial(_job_figures, play, job)) for text, job in texts]
        rows = self.played(runs, lambda row: told(by_text[row["job"]], figures_of(figures, row)))
        return [figures_of(figures, row) for row in rows]

    def _play(self, fresh: Sequence[SweepRun], told: Callable[[Row], str]) -> None:
        began_s, done = time.monotonic(), 0

        def ended(number: int, played: tuple[Row, float]) -> None:
            nonlocal done
            done += 1
            figures, cpu_s = played
            row = {**fresh[number].key, **figures, "code": self.code}
            self.rows.add(row)
            left = len(fresh) - done
            count = f"{done}/{len(fresh)}: " if len(fresh) > 1 else ""
            rest = f"; about {duration((time.monotonic() - began_s) / done * left)} left" if left else ""
            self.say(f"{count}{told(row)} ({cpu_s:.1f} s of CPU){rest}")

        if self._scheduler is None or not fresh:
            for number, run in enumerate(fresh):
                ended(number, _played(run))
            return
        # Imported here: Dask takes seconds.
        from heddle_dask.cli.sweep_runs import run_on_cluster

        run_on_cluster(_played, fresh, self._scheduler, self.say, ended)


class KeptRows(Runner):
    """Finds the rows of a file, whatever code made them, and makes none.

    Raises
    ------
    BadInput
        The file cannot be read, or has a job of two versions of the code.
    """

    def __init__(self, path: Path) -> None:
        kept = RowFile()
        for row in RowFile(path).rows("job"):
            any_code = {**row, "code": ""}
            if kept.find(any_code) is not None:
                raise BadInput(f"{path}: a job has rows of two versions of the code: remove those of the older one")
            kept.add(any_code)
        super().__init__(kept, "")
        self._path = path

    def _play(self, fresh: Sequence[SweepRun], told: Callable[[Row], str]) -> None:
        if fresh:
            raise BadInput(f"{self._path} lacks {len(fresh)} rows of this experiment and these seeds")


def runner_of(out: Path | None, code: str, scheduler: str | None = None) -> Runner:
    """A runner of the rows of a file that can be written, which says on stderr what it does.

    Raises
    ------
    BadInput
        See `RowFile`.
    """
    rows = RowFile(out)
    rows.check_writable()
    return Runner(rows, code, lambda line: click.echo(line, err=True), scheduler)


def _played(run: SweepRun) -> tuple[Row, float]:
    """The figures of a run, and the CPU seconds that it took."""
    began_s = time.process_time()
    return run.play(), time.process_time() - began_s


def _job_figures(play: Callable[[J], F], job: J) -> Row:
    return asdict(play(job))


def _text(job: DataclassInstance) -> str:
    """A text that is equal for equal jobs, in every process."""
    return json.dumps(asdict(job), sort_keys=True)


def figures_of(figures: type[F], row: Row) -> F:
    """The figures from the row that has them."""
    return figures(**{each.name: _frozen(row[each.name]) for each in fields(figures)})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class LastFew(Generic[T]):
    """Calls a function once for equal arguments, and keeps its last few results: arms of one seed share what is drawn.

    Arguments are equal when their texts are: some hold mappings, which have no hash.
    """

    def __init__(self, make: Callable[..., T], most: int = 8) -> None:
        self._make, self._most = make, most
        self._made: dict[str, T] = {}

    def __call__(self, *arguments: object) -> T:
        """The result."""
        text = repr(arguments)
        if text not in self._made:
            while len(self._made) >= self._most:
                del self._made[next(iter(self._made))]
            self._made[text] = self._make(*arguments)
        return self._made[text]
