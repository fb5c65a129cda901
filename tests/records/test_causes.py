"""Counts of failures: by status and cause, with a message that a person can use."""

from __future__ import annotations

import traceback
from dataclasses import replace

import pytest
from worlds.record_builders import plain_trajectory

from heddle_dask.live.driver.batch import BatchTally
from heddle_dask.records.causes import MESSAGE_CHARS, CauseCounts, Ended, message_of


def story_of(error: BaseException) -> str:
    """A traceback as the driver stores it."""
    try:
        raise error
    except BaseException as raised:
        return "".join(traceback.format_exception(raised))


def chained() -> str:
    try:
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("the agent gave up\nsecond line") from error
    except RuntimeError as error:
        return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("detail", "message"),
    [
        ("", ""),
        ("\n  it took longer than 3 s\nmore", "it took longer than 3 s"),
        (story_of(ValueError("bad value")), "ValueError: bad value"),
        (chained(), "RuntimeError: the agent gave up"),
        # What an action said of itself follows the driver's own traceback: the driver's names the action.
        (f"{story_of(ValueError('tool f raised'))}\n{story_of(KeyError('x'))}", "ValueError: tool f raised"),
        (
            story_of(ExceptionGroup("two", [ValueError("a"), ValueError("b")])),
            "ExceptionGroup: two (2 sub-exceptions)",
        ),
        ("red \x1b[31mtext\x07", "red  [31mtext"),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
    ],
)
def test_message_is_one_line_that_names_the_error(detail, message):
    assert message_of(detail) == message


def test_message_is_bounded():
    assert len(message_of("x" * 10_000)) == MESSAGE_CHARS and message_of("x" * 10_000).endswith("…")


def test_counts_are_by_status_and_cause_with_the_first_message_of_each():
    counts = CauseCounts()
    counts.add(Ended("a", "completed", "", ""))
    counts.add(Ended("b", "truncated", "time", "too long"))
    counts.add(Ended("c", "failed", "agent", "first"))
    counts.add(Ended("d", "failed", "agent", "second"))
    counts.add(Ended("e", "failed", "engine", "gone"))
    assert [(row.title, row.count, row.first_message, row.first_trajectory) for row in counts.rows()] == [
        ("failed by agent", 2, "first", "c"),
        ("failed by engine", 1, "gone", "e"),
        ("truncated by time", 1, "too long", "b"),
    ]


def test_a_batch_offers_the_same_counts():
    good = plain_trajectory(0)
    bad = replace(plain_trajectory(1), status="failed", cause="agent", detail="broken", reward=None)
    tally = BatchTally()
    for record in (good, bad):
        tally.add(record, is_stored=False)
    (row,) = tally.causes.rows()
    assert (row.status, row.cause, row.count, row.first_message) == ("failed", "agent", 1, "broken")
    assert row.first_trajectory == bad.trajectory_id
