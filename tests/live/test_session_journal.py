"""The journal lines that a session holds for its driver."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.live_session import LoneSession, first_session

from heddle_dask.core.controller import Controller
from heddle_dask.core.events import HostJoined
from heddle_dask.core.ids import HostId
from heddle_dask.core.journal_codec import gap, missing_lines, of_run, replay
from heddle_dask.core.nouns import HostDescription
from heddle_dask.core.resources import Resources
from heddle_dask.core.run_description import RunDescription
from heddle_dask.live.driver.connection.control_channel import JournalInOrder
from heddle_dask.live.driver.files.recorded_sessions import RecordedSession
from heddle_dask.live.scheduler import journal_spool
from heddle_dask.live.scheduler import session as session_module
from heddle_dask.live.wire.driver_messages import Updates
from heddle_dask.strategies.described import strategies_of_description

FIRST = RunDescription(strategy="least-load")
FACTS = {"strategy": "heddle", "overrides": [], "seed": 0, "cost": None}


def join(session: LoneSession, number: int) -> None:
    host = HostDescription(HostId(f"h{number}"), Resources.of(cpus=4))
    session.feed(HostJoined(session.session.now(), host))


def second_session(first: LoneSession) -> LoneSession:
    run = RunDescription(first.control.next_run(), strategy="heddle")
    return LoneSession(first.control, "other", run)


def test_lines_that_a_driver_did_not_fetch_are_counted_in_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "JOURNAL_LINES_KEPT", 4)

    async def body() -> None:
        lone = first_session(FIRST)
        for number in range(5):
            join(lone, number)
        first = (await lone.session.updates(0.0)).journal
        assert len(first) == 5 and first[4] == gap(2)
        assert [missing_lines(line) for line in first] == [0, 0, 0, 0, 2]
        join(lone, 5)
        second = (await lone.session.updates(0.0)).journal
        assert [missing_lines(line) for line in second] == [0]
        assert list(replay(Controller(strategies_of_description(FIRST)), first[:4])) == []

    asyncio.run(body())


@given(st.data())
def test_answers_that_overtake_each_other_are_written_in_order_and_a_lost_one_is_counted(data: st.DataObject) -> None:
    async def answers(sizes: list[int]) -> list[Updates]:
        lone = first_session(FIRST)
        lines = iter(range(sum(sizes)))
        given = []
        for size in sizes:
            for number in itertools.islice(lines, size):
                join(lone, number)
            given.append(await lone.session.updates(0.0))
        return [*given, lone.session.last_updates()]

    sent = asyncio.run(answers(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))))
    arrived = data.draw(st.permutations(range(len(sent))))
    lost = data.draw(st.sampled_from([None, *range(len(sent))]))
    written: list[Any] = []
    journal = JournalInOrder(written.extend)
    for number in arrived:
        if number != lost:
            journal.take(sent[number].journal, sent[number].lines_before)
    kept = [line for number, each in enumerate(sent) if number != lost for line in each.journal]
    assert written == kept[: len(written)]
    journal.close()
    missing = 0 if lost is None else len(sent[lost].journal)
    if missing and any(each.journal for each in sent[lost + 1 :]):
        kept.insert(sent[lost].lines_before, gap(missing))
    assert written == kept


def replayed(lines: Sequence[Any]) -> RecordedSession:
    session = RecordedSession(FACTS)
    session.take(lines)
    return session


@pytest.mark.parametrize("all_at_once", [False, True])
def test_a_run_that_joins_late_gets_the_journal_from_its_beginning(
    all_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_spool, "BLOCK_ROWS", 4)

    async def body() -> None:
        first = first_session(FIRST)
        for number in range(10):
            join(first, number)
        second = second_session(first)
        join(first, 10)
        lines: list[Any] = []
        if all_at_once:
            lines = second.session.last_updates().journal
        else:
            while True:
                part = (await second.session.updates(0.0)).journal
                lines += part
                if not part:
                    break
                if len(lines) < 14:
                    join(first, 100 + len(lines))
        assert lines[0] == of_run(second.session.run.run_id)
        of_first = first.session.last_updates().journal
        assert lines[1:] == of_first
        session = replayed(lines)
        assert session.mismatch is None and session.missing == 0
        assert session.events == session.compared == len(of_first)
        first.control.close()

    asyncio.run(body())


def test_what_the_disk_does_not_keep_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_spool, "BLOCK_ROWS", 4)
    monkeypatch.setattr(journal_spool, "SPOOL_BYTES", 1)

    async def body() -> None:
        first = first_session(FIRST)
        for number in range(10):
            join(first, number)
        lines = second_session(first).session.last_updates().journal
        assert [missing_lines(line) for line in lines[1:]] == [0, 0, 0, 0, 7, 0]
        assert replayed(lines).missing == 7
        first.control.close()

    asyncio.run(body())
