"""Checks that the simulated controller makes the same decisions as before, to the last digit.

::

    python -m benchmarks behaviour record FILE    # play every cell and keep its figures
    python -m benchmarks behaviour check FILE     # play them again; exit code 1 where one differs
    python -m benchmarks behaviour commands CELL  # the commands of one cell, to compare two versions
    python -m benchmarks behaviour journal RUN    # the commands of a live run, as replayed here

The cells are those of `behaviour_cells`. A kept digest is that of every command with its virtual time, in the form of
`normalised_commands`: a change of how commands are built does not change it, a change of one decision does.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click

from benchmarks.behaviour_cells import BehaviourCell, CommandStream, all_cells, play
from benchmarks.code_digest import DECIDING, code_digest
from benchmarks.normalised_commands import canonical, command_rows
from heddle_dask.core.errors import BadInput

Figures = dict[str, Any]

_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
_jobs = click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
_only = click.option("--only", default="", help="Only cells with this text in their name.")


@click.group()
def behaviour() -> None:
    """Check that the simulated controller makes the same decisions as before, to the last digit."""


@behaviour.command()
@_file
@_jobs
@_only
@click.option("--missing", is_flag=True, help="Only cells that FILE lacks; the others stay as they are.")
def record(file: Path, jobs: int, only: str, missing: bool) -> None:
    """Play every cell and write its figures to FILE, after each one; with --only FILE keeps its other cells."""
    found = _kept(file) if (missing or only) and file.exists() else {}
    cells = [cell for cell in all_cells() if only in cell.name]
    cells = [cell for cell in cells if not (missing and cell.name in found)]
    for cell, figures in zip(cells, _played(cells, jobs), strict=True):
        found[cell.name] = figures
        file.write_text(_text(found), encoding="utf-8")
        click.echo(f"{cell.name}: {figures['makespan_s']:.1f} s", err=True)
    click.echo(f"{len(cells)} cells recorded, {len(found)} in {file}")


@behaviour.command()
@_file
@_jobs
@_only
def check(file: Path, jobs: int, only: str) -> None:
    """Play the cells of FILE again; a line for each that differs, and exit code 1."""
    kept = _kept(file)
    chosen = [cell for cell in all_cells() if only in cell.name]
    names = {cell.name for cell in chosen}
    cells = [cell for cell in chosen if cell.name in kept]
    gone = [name for name in kept if only in name and name not in names]
    for name in gone:
        click.echo(f"{name}: recorded, and no cell now")
    differing = len(gone)
    for cell, figures in zip(cells, _played(cells, jobs), strict=True):
        differences = list(_differences(kept[cell.name], figures))
        if differences:
            differing += 1
            click.echo(f"{cell.name}: {'; '.join(differences)}")
    notes = [f"{len(chosen) - len(cells)} not recorded"] if len(chosen) > len(cells) else []
    click.echo(", ".join([f"{len(cells) + len(gone) - differing} cells identical", *notes]))
    if differing:
        click.echo(f"{differing} differ")
        sys.exit(1)
    if not cells:
        raise BadInput(f"no cell of {file} was played: give another --only")


@behaviour.command()
@click.argument("cell")
def commands(cell: str) -> None:
    """Write the commands of the cell of this name, one per line: virtual time, type, leaves."""
    chosen = next((one for one in all_cells() if one.name == cell), None)
    if chosen is None:
        raise BadInput(f"no cell {cell!r}: give a name that `record` writes")
    stream = CommandStream(keeps=True)
    play(chosen, stream)
    click.echo("".join(stream.lines), nl=False)


@behaviour.command()
@click.argument("run", type=click.Path(path_type=Path))
def journal(run: Path) -> None:
    """Write the commands of the present controller for the events of RUN: one JSON line per event."""
    for rows in _replayed(run):
        click.echo(canonical(rows))


def _replayed(run: Path) -> Iterator[list[object]]:
    """For each event: its virtual time, its type, and the rows of its commands."""
    from heddle_dask.core.controller import Controller
    from heddle_dask.core.journal_codec import decode
    from heddle_dask.live.driver.files.recorded_sessions import control_lines
    from heddle_dask.strategies.presets import strategies_of_run

    for facts, lines in control_lines(run):
        if facts is not None:
            controller = Controller(strategies_of_run(facts))
        for event_row, _ in lines:
            event: Any = decode(event_row)
            yield [event.at, type(event).__name__, command_rows(controller.handle(event))]


def _played(cells: Sequence[BehaviourCell], jobs: int) -> Iterator[Figures]:
    """The figures of each cell, in their order."""
    if jobs == 1:
        yield from map(_play, cells)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_play, cells)


def _play(cell: BehaviourCell) -> Figures:
    return play(cell, CommandStream())


def _differences(old: Figures, new: Figures) -> Iterator[str]:
    """The differing figures; the digest only if no other figure differs."""
    shown = partial(json.dumps, sort_keys=True)
    keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    for key in keys:
        if key != "digest":
            yield f"{key} {shown(old.get(key))} -> {shown(new.get(key))}"
    if keys == ["digest"]:
        yield f"same figures, other commands: digest {old['digest'][:12]} -> {new['digest'][:12]}"


def _text(cells: dict[str, Figures]) -> str:
    """JSON with one line per cell, sorted."""
    made = {
        "code": code_digest(DECIDING),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "xgboost": version("xgboost"),
    }
    lines = ",\n".join(f"{json.dumps(name)}:{canonical(cells[name])}" for name in sorted(cells))
    return f'{{"made":{canonical(made)},\n"cells":{{\n{lines}\n}}}}\n'


def _kept(file: Path) -> dict[str, Figures]:
    try:
        cells: dict[str, Figures] = json.loads(file.read_text(encoding="utf-8"))["cells"]
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}; give a file that `record` wrote") from None
    except (ValueError, KeyError, TypeError):
        raise BadInput(f"{file}: not a file that `record` wrote") from None
    return cells
