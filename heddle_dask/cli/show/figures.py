"""Reads a stored run into the figures of its report: records, and what its journal tells."""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich import box
from rich.table import Table

from heddle_dask.cli.rollout.summary import Tally
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.files.recorded_sessions import control_lines, own_lines
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.views.accounts import NS_PER_S, PHASE_TITLE, account_of
from heddle_dask.views.report.journal_facts import SessionFacts
from heddle_dask.views.report.reasons import why_last
from heddle_dask.views.report.run_figures import RunFigures
from heddle_dask.views.report.run_report import About


def empty_figures(run: StoredRun, over_time: bool) -> RunFigures:
    """The figures before the first record."""
    return RunFigures(journalled_sessions(run), has_one_clock(run.metadata), over_time)


def has_one_clock(metadata: dict[str, Any]) -> bool:
    """Whether one session wrote the run: each session has its own clock, and times of two cannot be compared."""
    return all(int(metadata.get(count, 1)) <= 1 for count in ("batches", "sessions"))


def journalled_sessions(run: StoredRun) -> list[SessionFacts]:
    """What the journal tells of each session, oldest first; nothing where there is no journal.

    Raises
    ------
    BadInput
        The journal is damaged, or another version wrote it.
    """
    journal = journal_path(run.path)
    sessions: list[SessionFacts] = []
    if not journal.exists():
        return sessions
    for facts, lines in own_lines(control_lines(run.path)):
        if facts is not None:
            sessions.append(SessionFacts())
        try:
            sessions[-1].take(lines)
        except (LookupError, TypeError, ValueError):
            raise BadInput(
                f"{journal} has lines of the controller that this version does not know: use the version that wrote it"
            ) from None
    return sessions


def seconds_of(run: StoredRun, record: TrajectoryRecord) -> dict[str, float]:
    """Where the seconds of one trajectory went, by phase; what took none is left out."""
    known = [each.trajectories.get(record.trajectory_id) for each in journalled_sessions(run)]
    account = account_of(record, next((facts for facts in reversed(known) if facts is not None), None))
    return {
        phase.value: round(account.seconds(phase), 4) for phase in PHASE_TITLE if account.phases_ns.get(phase)
    }


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
        tiles.append((f"mean reward (of {len(tally.rewards):,})", f"{tally.reward_mean:.3f}"))
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
