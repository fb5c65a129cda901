"""The watch of a process by health checks: its silence is told once, then it is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle_dask.engines.health import HealthLimits, until_silent
from heddle_dask.engines.model_services.served_process import ProcessEnded, ServedProcess


def test_silence_is_told_and_its_end_and_a_process_that_stays_silent_is_lost() -> None:
    lines: list[str] = []
    limits = HealthLimits(interval_s=0.001, told_s=0.004, misses=9)

    def answers() -> Iterator[bool]:
        yield from (True, False, True)  # one missed check is no news
        while not lines:
            yield False
        yield True
        while True:
            yield False

    script = answers()

    async def healthy() -> bool:
        return next(script)

    watch = until_silent("service rm", healthy, lambda: False, limits, lines.append)
    assert asyncio.run(asyncio.wait_for(watch, 60)) == "it missed 9 health checks in a row"
    silent = "service rm has not answered for 0.004 s"
    assert lines == [silent, "service rm answers again", silent]


HANGS = """
import sys, time
from aiohttp import web

async def answer(request):
    if request.path == "/hang":
        time.sleep(600)
    return web.json_response({})

app = web.Application()
app.router.add_route("*", "/{path:.*}", answer)
web.run_app(app, path=sys.argv[1], print=None)
"""


def test_a_loop_that_hangs_is_told_and_lost(tmp_path: Path) -> None:
    lines: list[str] = []

    async def body() -> None:
        limits = HealthLimits(interval_s=0.05, misses=8, check_s=0.1, told_s=0.3)
        process = ServedProcess("rm-0-1", tmp_path, tmp_path, limits=limits, tell=lines.append)
        try:
            await process.start([sys.executable, "-c", HANGS, process.address.socket], {}, 60.0)
            with pytest.raises(ProcessEnded, match=r"service rm-0-1 is lost: it missed 8 health checks in a row"):
                await process.unless_ended(process.client.ask("GET", "/hang"))
        finally:
            os.kill(process.process_id, signal.SIGKILL)  # it would not end by itself
            await process.stop()

    asyncio.run(asyncio.wait_for(body(), 120))
    assert lines == ["service rm-0-1 has not answered for 0.3 s"]
