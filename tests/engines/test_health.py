"""The watch of a process by health checks: its silence is told once, then it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from heddle_dask.engines.health import HealthLimits, until_silent


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
