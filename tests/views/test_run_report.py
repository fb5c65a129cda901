"""The report of a run: figures of known records, what it says is unknown, and a page that stands alone."""

from __future__ import annotations

import itertools
import json
import math
import re
import xml.dom.minidom
from dataclasses import replace

import pytest
from worlds.run_builders import hostile_trajectory, journal_lines, outline_of, session_of, timed_trajectory

from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId
from heddle_dask.core.journal_codec import encode
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.views.accounts import Phase
from heddle_dask.views.report.journal_facts import SessionFacts
from heddle_dask.views.report.run_charts import RunAxis
from heddle_dask.views.report.run_events import rank_correlation
from heddle_dask.views.report.run_figures import LONGEST, SAMPLED, RunFigures
from heddle_dask.views.report.run_report import About, run_report, totals_json, unknown_notes

ABOUT = About("run.zarr", [("trajectories", "4")], {"environment": "math", "engine": {"kind": "emulated"}})


def _figures(
    records: list[TrajectoryRecord], sessions: list[SessionFacts] | None = None, one_clock: bool = True
) -> RunFigures:
    figures = RunFigures([session_of(records)] if sessions is None else sessions, one_clock)
    for record in records:
        figures.add(outline_of(record))
    return figures


def _charts(page: str) -> list[str]:
    return ["<svg" + phase.partition("</svg>")[0] + "</svg>" for phase in page.split("<svg")[1:]]


def test_totals_of_known_records() -> None:
    figures = _figures([timed_trajectory(number) for number in range(4)])
    totals = totals_json(figures)
    # Of 4 trajectories with 3 steps; each but the first of a trajectory has waited 0.25 s for its move.
    assert totals["total_s"] == 4 * (9.5 + 1)
    assert (totals["admission_s"], totals["prefill_s"], totals["decode_s"]) == (4.0, 6.0, 12.0)
    assert (totals["llm_queue_s"], totals["migration_s"]) == (4.0, 2.0)
    assert (totals["tool_queue_s"], totals["tool_s"], totals["driver_s"]) == (3.0, 9.0, 2.0)
    assert totals["admission_unknown"] == totals["waits_unknown"] == 0 and not unknown_notes(figures)
    assert (
        sum(value for name, value in totals.items() if name.endswith("_s") and name != "total_s") == totals["total_s"]
    )


def test_engines_and_actions_of_known_records() -> None:
    figures = _figures([timed_trajectory(number) for number in range(4)])
    first, second = figures.engines[0, "engine-0"], figures.engines[0, "engine-1"]
    # Steps 0 and 2 of each trajectory ran on the first engine, step 1 on the second: 1.5 s of work after 0.5 s.
    assert (first.steps, second.steps, first.tokens) == (8, 4, 40)
    assert (first.running.total(), second.running.total()) == (12.0, 6.0)
    assert (first.queued.total(), second.queued.total()) == (4.0, 2.0)
    # A context is held from the submission of its step to that of the next one, or to the end: of 10, 20 and 30 tokens.
    assert first.held.total() == 4 * (10 * 3 + 30 * 3.5) and second.held.total() == 4 * 20 * 3
    (use,) = figures.actions.values()
    assert use.statuses == {"ok": 12} and use.cpu_s == 12 * 0.75 * 2
    assert figures.running_actions[0].total() == 9.0 and figures.queued_actions[0].total() == 3.0


def test_the_journal_is_gone() -> None:
    figures = _figures([timed_trajectory(number) for number in range(4)], sessions=[])
    notes = unknown_notes(figures)
    assert figures.totals_ns[Phase.ADMISSION] == figures.totals_ns[Phase.MIGRATION] == 0
    assert len(notes) == 2 and "admission is unknown for 4 of 4" in notes[0] and "Moves and lost attempts" in notes[1]
    page = run_report(figures, ABOUT)
    assert "journal is gone" in page and "Timeline of trajectories" in page and "<path" in page


def test_sessions_have_clocks_of_their_own() -> None:
    first = [timed_trajectory(number, name=f"a{number}") for number in range(3)]
    second = [timed_trajectory(number, name=f"b{number}", start_s=500.0) for number in range(3)]
    figures = _figures([*first, *second], [session_of(first), session_of(second)], one_clock=False)
    axis = RunAxis(figures)
    assert axis.axis.places_s == {0: 0.0, 1: pytest.approx(11.5)}
    assert axis.until_s == pytest.approx(11.5 + 10.5)
    states = {session: mine for (session, phase), mine in figures.states.items() if phase is Phase.DECODE}
    cells = axis.means(states, 44) * axis.until_s / 44
    # All decoding is on the axis, and each session's in its own place.
    assert cells.sum() == pytest.approx(figures.totals_ns[Phase.DECODE] / 1e9)
    assert cells[:23].sum() == pytest.approx(9.0)
    assert [mark.text for mark in axis.marks()] == ["session 2"]
    assert axis.at_journal_time(1, 497.0) == pytest.approx(11.5 + 1.0)
    # Without the journal nobody knows which session a trajectory is of.
    unknown = _figures([*first, *second], [], one_clock=False)
    assert "not drawn over time" in " ".join(unknown_notes(unknown))
    assert "No trajectory can be placed" in run_report(unknown, ABOUT)
    assert unknown.totals_ns[Phase.DECODE] == figures.totals_ns[Phase.DECODE]


def test_a_trajectory_that_a_later_session_ran_again_is_of_that_session() -> None:
    record = timed_trajectory(0)
    figures = _figures([record], [session_of([record], waited_s=40.0), session_of([record], waited_s=2.0)], False)
    assert figures.rows[0].session == 1 and figures.totals_ns[Phase.ADMISSION] == 2_000_000_000


def test_engines_that_do_not_report_and_lines_that_are_missing() -> None:
    record = timed_trajectory(0)
    unreported = replace(record.steps[0], prefill_s=math.nan, decode_s=math.nan)
    record = replace(record, steps=(unreported, *record.steps[1:]))
    session = session_of([record])
    session.missing = 7
    notes = " ".join(unknown_notes(_figures([record], [session])))
    assert "do not report prefill and decode" in notes and "lacks 7 events" in notes


def test_an_engine_without_a_step_is_in_the_table_with_the_seconds_in_which_steps_waited() -> None:
    record = timed_trajectory(0)
    joined = ev.EngineJoined(0.0, EngineDescription(EngineId("unused"), 4, 100))
    session = SessionFacts()
    session.take([[encode(joined), []], *journal_lines([record], 1.0)])
    # Each of the three steps has waited 0.5 s for its engine.
    page = run_report(_figures([record], [session]), ABOUT)
    row = page[page.index("<code>unused</code>") :].partition("</tr>")[0]
    assert re.findall(r">([\d.]+)</td>", row) == ["4", "1", "0", "0", "0.0", "1.5"]


def test_the_longest_come_first_and_the_sample_is_even() -> None:
    records = [timed_trajectory(number, steps=1 + number % 7) for number in range(900)]
    figures = _figures(records, sessions=[])
    durations = [shown.row.duration_ns for shown in figures.longest]
    assert durations == sorted((row.duration_ns for row in figures.rows), reverse=True)[:LONGEST]
    assert len(figures.drawn) <= LONGEST + SAMPLED
    numbers = [int(shown.row.trajectory_id[1:]) for shown in figures._sample]
    assert len({b - a for a, b in itertools.pairwise(numbers)}) == 1 and len(numbers) > SAMPLED // 2
    page = run_report(figures, ABOUT)
    first = re.search(r"why it ended last</th>.*?<code>(t\d+)</code>", page)
    assert first is not None and int(first[1][1:]) % 7 == 6


def test_the_page_stands_alone_and_every_chart_is_well_formed() -> None:
    page = run_report(_figures([timed_trajectory(number) for number in range(12)]), ABOUT)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    for outside in (" src=", "@import", "url(", "<link", "<img", "<iframe"):
        assert outside not in page
    assert "default-src 'none'" in page and "prefers-color-scheme:dark" in page
    charts = _charts(page)
    assert len(charts) > 8
    for chart in charts:
        xml.dom.minidom.parseString(chart)
    titles = (
        "Where each second went|The longest trajectories|Timeline of trajectories|Live trajectories and the tail|"
        "Engines over time|Predicted against actual length|Actions and pools|Failures by cause|"
        "Migrations and preemptions|All trajectories|Conditions"
    )
    for title in titles.split("|"):
        assert f"<h2>{title}</h2>" in page
    assert page.count("<section>") == page.count("</section>")


def test_names_and_messages_are_text() -> None:
    page = run_report(_figures([hostile_trajectory()]), replace(ABOUT, title="<script>alert(1)</script>"))
    assert "<script>alert" not in page and page.count("<script") == page.count("</script>") == 2
    for chart in _charts(page):
        xml.dom.minidom.parseString(chart)
    data = re.search(r'id="rows-data">(.*?)</script>', page)
    assert data is not None
    rows = json.loads(data[1])["rows"]
    assert rows[0][0] == hostile_trajectory().trajectory_id


def test_the_table_of_all_has_the_numbers_of_the_records() -> None:
    figures = _figures([timed_trajectory(number, steps=1 + number) for number in range(4)])
    page = run_report(figures, ABOUT)
    data = re.search(r'id="rows-data">(.*?)</script>', page)
    assert data is not None
    table = json.loads(data[1])
    names = [column["name"] for column in table["columns"]]
    longest = dict(zip(names, table["rows"][0], strict=True))
    assert (longest["trajectory"], longest["seconds"], longest["steps"], longest["tokens"]) == (
        "t3",
        13.5,
        4,
        20,
    )
    parts = names[names.index("seconds") + 1 : names.index("tokens")]
    assert sum(longest[name] for name in parts) == pytest.approx(longest["seconds"])


def test_a_run_without_trajectories_has_a_report() -> None:
    page = run_report(_figures([], []), ABOUT)
    assert "No trajectory took any time" in page and 'rows-data">' not in page


def test_rank_correlation_with_ties() -> None:
    assert rank_correlation([(1, 1), (2, 2), (3, 3)]) == pytest.approx(1.0)
    assert rank_correlation([(1, 9), (2, 5), (2, 5), (3, 1)]) == pytest.approx(-1.0)
    assert str(rank_correlation([(1, 1), (1, 2)])) == "nan"
