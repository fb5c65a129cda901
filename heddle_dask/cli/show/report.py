"""Prints a stored run in figures, or one trajectory as a transcript."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.cli.rollout.summary import Tally, table
from heddle_dask.cli.shared_options import write_file
from heddle_dask.cli.show.transcript import Passage, passages, trajectory_facts
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput
from heddle_dask.core.value_types import read_from
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.spec import ENGINE_KINDS, engine_kind
from heddle_dask.live.driver.files.recorded_sessions import control_lines, own_lines
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.causes import message_of
from heddle_dask.records.schema import counted
from heddle_dask.records.token_record import Attribution
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.views.accounts import NS_PER_S, PHASE_TITLE, account_of
from heddle_dask.views.drawing.safe_console import SafeConsole
from heddle_dask.views.report.journal_facts import SessionFacts
from heddle_dask.views.report.reasons import why_last
from heddle_dask.views.report.run_figures import RunFigures
from heddle_dask.views.report.run_report import About, run_report, totals_json, unknown_notes
from heddle_dask.views.trace.run_trace import RunTrace

_STYLES = {
    Attribution.PROMPT: "cyan",
    Attribution.POLICY: "green",
    Attribution.TOOL: "yellow",
    Attribution.TEMPLATE: "dim",
    Attribution.SHARED: "dim",
    Attribution.PREFIX: "magenta",
}
_MADE_WITH = ("environment", "model", "strategy", "samples", "seed")


def empty_figures(run: StoredRun, over_time: bool) -> RunFigures:
    return RunFigures(journalled_sessions(run), has_one_clock(run.metadata), over_time)


def has_one_clock(metadata: dict[str, Any]) -> bool:
    """Whether one session wrote the run: each session has its own clock, and times of two cannot be compared."""
    return all(counted(metadata, count, 1) <= 1 for count in ("batches", "sessions"))


def journalled_sessions(run: StoredRun) -> list[SessionFacts]:
    """What the journal tells of each session, oldest first; nothing where there is no journal."""
    journal = journal_path(run.path)
    sessions: list[SessionFacts] = []
    if not journal.exists():
        return sessions
    with read_from(journal):
        for facts, lines in own_lines(control_lines(run.path)):
            if facts is not None:
                sessions.append(SessionFacts())
            sessions[-1].take(lines)
        for session in sessions:
            session.check()
    return sessions


def seconds_of(run: StoredRun, record: TrajectoryRecord) -> dict[str, float]:
    """Where the seconds of one trajectory went, by phase; what took none is left out."""
    known = [each.trajectories.get(record.trajectory_id) for each in journalled_sessions(run)]
    account = account_of(record, next((facts for facts in reversed(known) if facts is not None), None))
    return {phase.value: round(account.seconds(phase), 4) for phase in PHASE_TITLE if account.phases_ns.get(phase)}


def seconds_table(figures: RunFigures) -> Table:
    """Where the seconds of all trajectories went, for the terminal."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="where each second went", title_justify="left")
    shown.add_column("phase", style="bold")
    for name in ("seconds", "share", "mean"):
        shown.add_column(name, justify="right")
    total_ns, count = sum(figures.totals_ns.values()), max(1, len(figures.rows))
    for phase, title in PHASE_TITLE.items():
        length = figures.totals_ns[phase]
        if length:
            seconds = length / NS_PER_S
            shown.add_row(title, f"{seconds:,.1f}", f"{length / total_ns:.1%}", f"{seconds / count:,.2f}")
    shown.add_row("total", f"{total_ns / NS_PER_S:,.1f}", "", f"{total_ns / NS_PER_S / count:,.2f}")
    return shown


def longest_line(figures: RunFigures) -> str:
    """The longest trajectory, and why, as `why_last` says it; empty without one."""
    if not figures.longest:
        return ""
    first = figures.longest[0]
    reason = why_last(first.record, first.account, figures.typical, first.row.losses)
    took = f"{first.row.trajectory_id} took longest, {first.account.duration_s:,.1f} s"
    return f"{took}; beyond the median of all: {reason}"


def about(run: StoredRun, tally: Tally) -> About:
    """What stands above the views of a report."""
    ends = ", ".join(f"{count:,} {status}" for status, count in tally.statuses.items() if count)
    tiles = [("trajectories", f"{tally.trajectories:,}"), ("ended", ends or "none")]
    if tally.makespan_s:
        tiles.append(("makespan", f"{tally.makespan_s:,.1f} s"))
    if tally.bound_s and tally.makespan_s:
        tiles.append(("of the measured lower bound", f"{tally.bound_s / tally.makespan_s:.0%}"))
    tiles.append(("tokens generated", f"{tally.tokens:,}"))
    if tally.tokens_per_s:
        tiles.append(("tokens per second", f"{tally.tokens_per_s:,.0f}"))
    if tally.reward_mean is not None:
        tiles.append((f"mean reward (of {tally.rewards.known:,})", f"{tally.reward_mean:.3f}"))
    tiles += [("steps", f"{tally.steps:,}"), ("actions", f"{tally.actions:,}")]
    if tally.durations:
        durations = sorted(seconds for seconds, _ in tally.durations)
        tiles.append(("median from start to end", f"{statistics.median(durations):,.1f} s"))
        tiles.append(("99th percentile", f"{durations[math.ceil(0.99 * len(durations)) - 1]:,.1f} s"))
    notes = []
    if run.recovered or run.unfinished:
        notes.append(
            f"The writer of this run was killed or is still running: {run.recovered:,} of these trajectories are only "
            f"in the journal, {run.unfinished:,} are not finished and not shown."
        )
    return About(run.path.name, tiles, run.metadata, notes)


def show_run(path: Path, *, to_stderr: bool, html: Path | None = None, perfetto: Path | None = None) -> dict[str, Any]:
    run = StoredRun(path)
    tally = Tally(
        counted(run.metadata, "slots", 0),
        counted(run.metadata, "tool_cpus", 0),
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
    sessions = figures.sessions
    if not timed and len(sessions) >= counted(run.metadata, "sessions", 1):  # the journal has all of them
        tally.sessions_s = tuple(each.makespan_s for each in sessions)
    console = SafeConsole(stderr=to_stderr, soft_wrap=True)
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


def _print_run(console: SafeConsole, run: StoredRun, tally: Tally, figures: RunFigures) -> None:
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
    """Print one line for each trajectory that did not complete and return them."""
    console = SafeConsole(stderr=to_stderr, soft_wrap=True)
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
    run = StoredRun(path)
    record = run.find(name)
    template = _template(str(run.metadata.get("model", "")))
    shown = list(passages(record, template))
    console = SafeConsole(stderr=to_stderr, soft_wrap=True)
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


def _print_passage(console: SafeConsole, passage: Passage) -> None:
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
