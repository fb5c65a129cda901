"""A program that blocks the driver's loop is named, with its line; one that awaits is not."""

from __future__ import annotations

import asyncio
import time

import pytest

from heddle_dask.live.driver.runs import loop_watch
from heddle_dask.live.driver.runs.loop_watch import LoopWatch


def test_the_program_that_holds_the_loop_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "LOOK_S", 0.02)
    lines: list[str] = []

    async def waits() -> None:
        while not lines:
            await asyncio.sleep(0)

    async def parses() -> None:
        await asyncio.sleep(0.1)
        assert lines == []
        while not lines:
            time.sleep(0.001)
        time.sleep(0.1)

    async def body() -> None:
        with LoopWatch(lines.append):
            tasks = [asyncio.create_task(waits(), name="t1/0"), asyncio.create_task(parses(), name="t2/0")]
            await asyncio.gather(*tasks)

    asyncio.run(body())
    (line,) = lines
    assert line.startswith("t2/0 holds the event loop of the driver for 0 s (")
    assert f"{__file__}:" in line and "in parses" in line
