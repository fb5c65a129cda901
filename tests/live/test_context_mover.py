"""A move that fails in a way that was not foreseen is reported like every other failure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from distributed import Client, Scheduler, Worker
from tornado.ioloop import IOLoop
from worlds.dask_cluster import with_cluster

from heddle_dask.core.commands import MoveContext
from heddle_dask.core.events import MoveEnded
from heddle_dask.core.ids import EngineId, TrajectoryId
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.client import EngineClient
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.envelopes import Report
from heddle_dask.live.wire.worker_messages import ExportContext, MoveContextOrder
from heddle_dask.live.worker.background_tasks import BackgroundTasks
from heddle_dask.live.worker.context_cache import ContextCache
from heddle_dask.live.worker.context_mover import ContextMover

pytestmark = pytest.mark.cluster


@dataclass
class Owner:
    worker: Worker | None
    engine_id: str
    client: EngineClient | None


def test_an_answer_that_cannot_be_read_ends_the_move(caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        source, target = workers

        async def another_versions_answer(**_: object) -> dict[str, object]:
            return {"op": "heddle_exported_context", "colour": "red"}

        source.handlers[ExportContext.op] = another_versions_answer
        told: list[Message] = []
        async with EngineClient(EngineAddress("/no/such.sock")) as engine:
            mover = ContextMover(Owner(target, "E2", engine), ContextCache(), told.append)
            command = MoveContext(TrajectoryId("a"), EngineId("E1"), EngineId("E2"), "recompute")
            await mover.move(MoveContextOrder("s", command, source.address))
        (report,) = told
        assert isinstance(report, Report) and isinstance(report.event, MoveEnded)
        ended = report.event
        assert (report.session, ended.trajectory_id, ended.ok, ended.tokens) == ("s", "a", False, 0)
        assert "TypeError" in ended.cause or "KeyError" in ended.cause
        assert "a move of a failed" in caplog.text

    with_cluster(body, workers=2)


def test_an_error_of_a_background_task_is_told_with_its_session_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        background = BackgroundTasks(IOLoop.current(), lambda *failure: told.put_nowait(failure))

        async def fails() -> None:
            raise ZeroDivisionError("no such thing")

        background.start(fails(), "s")
        session, line = await told.get()
        assert session == "s" and "fails failed: ZeroDivisionError: no such thing (test_context" in line
        await asyncio.sleep(0)
        assert not len(background)

    asyncio.run(asyncio.wait_for(body(), 60))
    assert "Traceback" in caplog.text
