"""Sections of a run's report that tell of predictions, failures, moves and preemptions."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from heddle_dask.views.drawing.colours import SERIES
from heddle_dask.views.drawing.page import figure, section, table
from heddle_dask.views.drawing.svg_runs import area_chart, scatter
from heddle_dask.views.report.intervals import counts_by_cell, edges_of
from heddle_dask.views.report.journal_facts import MoveFacts, PredictionFacts
from heddle_dask.views.report.reasons import shown_s
from heddle_dask.views.report.run_charts import RunAxis
from heddle_dask.views.report.run_figures import RunFigures

_POINTS = 1500
_PROGRESS = (0.0, 0.25, 0.5, 0.75)
_EVENT_CELLS = 200


def predictions_section(figures: RunFigures) -> str:
    pairs = {progress: list(_pairs(figures, progress)) for progress in _PROGRESS}
    first = pairs[0.0]
    if not first:
        return section(
            "Predicted against actual length",
            '<p class="soft">No prediction is known: the strategy predicts nothing, or the journal is gone.</p>',
        )
    drawn = first if len(first) <= _POINTS else [first[i * len(first) // _POINTS] for i in range(_POINTS)]
    rows = []
    for progress, points in pairs.items():
        # Where nothing was left to generate there is no factor.
        known = [(p, a) for p, a in points if p > 0 and a > 0]
        if len(known) > 1:
            factors = sorted(max(p / a, a / p) for p, a in known)
            rows.append(
                [
                    "before the first step" if not progress else f"after {progress:.0%} of the steps",
                    f"{len(known):,}",
                    _shown(rank_correlation(known)),
                    f"{statistics.median(factors):.2f}",
                    f"{factors[math.ceil(0.9 * len(factors)) - 1]:.2f}",
                ]
            )
    head = ["prediction", "trajectories", "rank correlation", "median factor", "p90 factor"]
    sources = Counter(
        each.source for session in figures.sessions for made in session.predictions.values() for each in made
    )
    said = ", ".join(f"{escape(source)} ({count:,})" for source, count in sources.most_common())
    return section(
        "Predicted against actual length",
        figure(
            scatter(
                [(actual, predicted) for predicted, actual in drawn],
                x_label="tokens generated after it",
                y_label="tokens predicted (median)",
            ),
            f"One point per trajectory, at its first prediction; on the dashed line the prediction is right. {said}.",
        ),
        table(head, rows, texts=(0,)),
        "<p>The factor is by how much a prediction is too long or too short: 1 is right, 2 is half or double.</p>",
    )


def _pairs(figures: RunFigures, progress: float) -> Iterator[tuple[float, float]]:
    """(predicted, actual) tokens that were left when that share of the steps was done, by the prediction then known."""
    for session in figures.sessions:
        for name, made in session.predictions.items():
            tokens = figures.main_step_tokens.get(name)
            if tokens is None:
                continue
            done = _latest(made, progress * len(tokens))
            if done is not None:
                yield done.tokens, float(sum(tokens[done.steps_finished :]))


def _latest(made: Sequence[PredictionFacts], steps: float) -> PredictionFacts | None:
    known = [each for each in made if each.steps_finished <= steps]
    return known[-1] if known else None


def rank_correlation(points: Sequence[tuple[float, float]]) -> float:
    """Spearman's, with mean ranks for ties; nan where one side is constant."""
    left, right = (_ranks([point[side] for point in points]) for side in (0, 1))
    try:
        return statistics.correlation(left, right)
    except statistics.StatisticsError:
        return math.nan


def _shown(correlation: float) -> str:
    return "all equal" if math.isnan(correlation) else f"{correlation:.2f}"


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        last = at
        while last + 1 < len(order) and values[order[last + 1]] == values[order[at]]:
            last += 1
        for place in order[at : last + 1]:
            ranks[place] = (at + last) / 2
        at = last + 1
    return ranks


def failures_section(figures: RunFigures) -> str:
    causes = figures.causes.rows()
    if not causes:
        return section("Failures by cause", "<p>Every trajectory completed.</p>")
    total = len(figures.rows)
    rows = [
        [
            escape(each.title),
            f"{each.count:,}",
            f"{each.count / total:.1%}",
            f"<code>{escape(each.first_trajectory)}</code>",
            escape(each.first_message),
        ]
        for each in causes
    ]
    return section(
        "Failures by cause",
        table(["cause", "trajectories", "share", "first", "its message"], rows, (0, 3, 4)),
    )


def moves_section(figures: RunFigures, axis: RunAxis) -> str:
    preempted = sum(row.preemptions for row in figures.rows)
    migrated = sum(row.migrations for row in figures.rows)
    said = (
        f"<p>{preempted:,} preempted parts of steps in "
        f"{sum(row.preemptions > 0 for row in figures.rows):,} trajectories; "
        f"{migrated:,} steps ran on another engine than the one before, in "
        f"{sum(row.migrations > 0 for row in figures.rows):,} trajectories.</p>"
    )
    moves = [move for session in figures.sessions for move in session.moves]
    aborts = sum(len(session.aborts) for session in figures.sessions)
    parts = [said]
    if (moves or aborts) and axis.until_s > 0:
        parts.append(
            figure(
                _events_chart(figures, axis),
                "Orders of the controller per cell of time: moves that began (blue), steps that were stopped (orange).",
            )
        )
    if moves:
        kinds = sorted({move.kind for move in moves})
        head = ["move", "began", "succeeded", "failed", "tokens", "mean", "waited for", "waited in all"]
        parts.append(table(head, [_move_row(kind, [m for m in moves if m.kind == kind]) for kind in kinds], texts=(0,)))
        parts.append("<p>A move is waited for where the next step is requested before the move has ended.</p>")
    elif not figures.sessions:
        parts.append('<p class="soft">The moves themselves are in the journal, which is gone.</p>')
    return section("Migrations and preemptions", *parts)


def _events_chart(figures: RunFigures, axis: RunAxis) -> str:
    edges = edges_of(axis.until_s, _EVENT_CELLS)
    moved, stopped = [], []
    for number, session in enumerate(figures.sessions):
        moved += [axis.at_journal_time(number, move.started_s) for move in session.moves]
        stopped += [axis.at_journal_time(number, at) for at, *_ in session.aborts]
    series = [
        (
            "moves that began",
            SERIES[0],
            counts_by_cell([at for at in moved if at is not None], edges).tolist(),
        ),
        (
            "steps that were stopped",
            SERIES[4],
            counts_by_cell([at for at in stopped if at is not None], edges).tolist(),
        ),
    ]
    return area_chart(series, until_s=axis.until_s, y_label="orders", height=200)


def _move_row(kind: str, moves: Sequence[MoveFacts]) -> list[str]:
    ended = [move for move in moves if move.ok is not None]
    exposed = [move.exposed_s for move in ended if move.exposed_s > 0]
    seconds = [move.ended_s - move.started_s for move in ended]
    return [
        escape(kind),
        f"{len(moves):,}",
        f"{sum(bool(move.ok) for move in ended):,}",
        f"{sum(not move.ok for move in ended):,}",
        f"{sum(move.tokens for move in ended):,}",
        shown_s(statistics.fmean(seconds)) if seconds else "",
        f"{len(exposed):,}",
        shown_s(sum(exposed)),
    ]
