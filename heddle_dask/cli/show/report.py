"""Prints a stored run in figures, or one trajectory as a transcript."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.cli.output_file import write_file
from heddle_dask.cli.rollout.summary import Tally, table
from heddle_dask.cli.show.figures import (
    about,
    empty_figures,
    has_one_clock,
    longest_line,
    seconds_of,
    seconds_table,
)
from heddle_dask.cli.show.transcript import Passage, passages, trajectory_facts
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.spec import ENGINE_KINDS, engine_kind
from heddle_dask.records.causes import message_of
from heddle_dask.records.token_record import Attribution
from heddle_dask.views.report.run_figures import RunFigures
from heddle_dask.views.report.run_report import run_report, totals_json, unknown_notes
from heddle_dask.views.trace.run_trace import RunTrace

_STYLES = {
    Attribution.PROMPT: "cyan",
    Attribution.POLICY: "green",
    Attribution.TOOL: "yellow",
    Attribution.TEMPLATE: "dim",
    Attribution.SHARED: "dim",
}
_MADE_WITH = ("environment", "model", "strategy", "samples", "seed")


def show_run(
    path: Path, *, to_stderr: bool, html: Path | None = None, perfetto: Path | None = None
) -> dict[str, Any]:
    """Print the figures of a run and return them.

    Parameters
    ----------
    html, perfetto
        Files to write: the report, and the trace.

    Raises
    ------
    BadInput
        It is no run.
    """
    run = StoredRun(path)
    tally = Tally(
        run.metadata.get("slots", 0),
        run.metadata.get("tool_cpus", 0),
        queued_inside=_prefill_includes_queue(run.metadata.get("engine")),
    )
    timed = has_one_clock(run.metadata)
    collect_seldom()  # millions of small lists of the journal are no garbage
    figures = empty_figures(run, over_time=html is not None or perfetto is not None)
    trace = None if perfetto is None else RunTrace(figures)
    for record in run.outlines():
        tally.add(record, timed=timed)
        account = figures.add(record)
        if trace is not None:
            trace.add(record, account)
    console = Console(stderr=to_stderr, soft_wrap=True)
    _print_run(console, run, tally, figures)
    if html is not None:
        write_file("--html", html, run_report(figures, about(run, tally)))
    if perfetto is not None and trace is not None:
        write_file("--perfetto", perfetto, trace.encoded())
    for name, written in (("report", html), ("trace for https://ui.perfetto.dev", perfetto)):
        if written is not None:
            console.print(f"{name}: {written}", highlight=False, markup=False)
    return {
        **tally.result(str(path)),
        "seconds": totals_json(figures),
        "html": None if html is None else str(html),
        "perfetto": None if perfetto is None else str(perfetto),
        "stored": run.stored,
        "recovered": run.recovered,
        "unfinished": run.unfinished,
        "dropped_bytes": run.dropped_bytes,
        "metadata": run.metadata,
    }


def _print_run(console: Console, run: StoredRun, tally: Tally, figures: RunFigures) -> None:
    made_with = ", ".join(f"{name} {run.metadata[name]}" for name in _MADE_WITH if name in run.metadata)
    console.print(made_with, highlight=False, markup=False)
    console.print(table(tally, str(run.path)))
    console.print(seconds_table(figures))
    for note in (longest_line(figures), *unknown_notes(figures)):
        console.print(note, highlight=False, markup=False)
    if run.recovered or run.unfinished:
        console.print(
            f"The writer of this run was killed or is still running: {run.recovered} of these trajectories are only in "
            f"the journal, {run.unfinished} are not finished. "
            "`heddle rollout --resume` with the same options continues the run.",
            highlight=False,
        )


def show_failed(path: Path, *, to_stderr: bool) -> dict[str, Any]:
    """Print one line for each trajectory that did not complete and return them.

    Raises
    ------
    BadInput
        It is no run.
    """
    console = Console(stderr=to_stderr, soft_wrap=True)
    rows = []
    for ended in StoredRun(path).ended():
        if not ended.succeeded:
            row = {
                "trajectory_id": ended.trajectory_id,
                "status": ended.status,
                "cause": ended.cause,
                "message": message_of(ended.detail),
            }
            console.print(Text("  ".join(value for value in row.values() if value)))
            rows.append(row)
    return {"out": str(path), "failed": rows}


def show_trajectory(path: Path, name: str, *, to_stderr: bool) -> dict[str, Any]:
    """Print the transcript of one trajectory and return it.

    Raises
    ------
    BadInput
        It is no run, or has no such trajectory.
    """
    run = StoredRun(path)
    record = run.find(name)
    template = _template(str(run.metadata.get("model", "")))
    shown = list(passages(record, template))
    console = Console(stderr=to_stderr, soft_wrap=True)
    facts = {**trajectory_facts(record), "seconds_by_phase": seconds_of(run, record)}
    for key, value in facts.items():
        if value not in ("", None, {}):
            console.print(Text(f"{key:>14}  ", "bold").append(str(value), "default"))
    for passage in shown:
        _print_passage(console, passage)
    if record.detail:
        console.print(Text(f"\n{record.detail}", "red"))
    if record.reward_detail:
        console.print(Text(f"\nits reward: {record.reward_detail}", "red"))
    return {
        **facts,
        "detail": record.detail,
        "reward_detail": record.reward_detail,
        "passages": [passage.as_json() for passage in shown],
    }


def _print_passage(console: Console, passage: Passage) -> None:
    if passage.author is None:
        console.print(Text(f"── {passage.title}", "magenta"))
        return
    console.print(Text(f"── {passage.title}", f"bold {_STYLES[passage.author]}"))
    console.print(Text(passage.text, _STYLES[passage.author]))


def _template(model: str) -> ChatTemplate | None:
    """The run's chat template; None if its model directory is gone: then tokens are only counted."""
    try:
        return ChatTemplate.load(model)
    except BadInput:
        return None


def _prefill_includes_queue(engine: object) -> bool:
    """Whether the engines of a run do so; False for a kind of another package, which a stored run may not import."""
    kind = str(engine.get("kind")) if isinstance(engine, dict) else ""
    return kind in ENGINE_KINDS and engine_kind(kind).prefill_includes_queue
