"""The journal lines that a session holds for its driver."""

from __future__ import annotations

import asyncio

import pytest

from heddle_dask.core.controller import Controller
from heddle_dask.core.events import HostJoined
from heddle_dask.core.ids import HostId
from heddle_dask.core.journal_codec import gap, missing_lines, replay
from heddle_dask.core.nouns import HostDescription
from heddle_dask.live.scheduler import session as session_module
from heddle_dask.live.scheduler.session import Session
from heddle_dask.strategies.presets import strategies_of_run

FACTS = {"strategy": "round-robin", "overrides": [], "seed": 0, "cost": None}


def test_lines_that_a_driver_did_not_fetch_are_counted_in_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "JOURNAL_LINES_KEPT", 3)

    async def body() -> None:
        session = Session("s", "client", Controller(strategies_of_run(FACTS)))

        def join(number: int) -> None:
            session.handle(HostJoined(session.now(), HostDescription(HostId(f"h{number}"), 4)))

        for number in range(5):
            join(number)
        first = (await session.updates(0.0)).journal
        assert len(first) == 4 and first[3] == gap(2)
        assert [missing_lines(line) for line in first] == [0, 0, 0, 2]
        join(5)
        second = (await session.updates(0.0)).journal
        assert [missing_lines(line) for line in second] == [0]
        assert list(replay(Controller(strategies_of_run(FACTS)), first[:3])) == []

    asyncio.run(body())
