"""Whether a process still answers: one that is stopped, or whose event loop hangs, keeps its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthLimits:
    interval_s: float = 2.0  # pause between two checks
    misses: int = 5  # checks in a row without an answer after which it is lost
    # The same where a process is found stopped (SIGSTOP): a health check would take its whole time limit.
    stopped_checks: int = 4


USUAL = HealthLimits()


async def until_silent(
    healthy: Callable[[], Awaitable[bool]], is_stopped: Callable[[], bool], limits: HealthLimits
) -> str:
    """Check until the process answers no more; returns why, in words that follow its name."""
    misses = stopped = 0
    while True:
        await asyncio.sleep(limits.interval_s)
        stopped = stopped + 1 if is_stopped() else 0
        if stopped >= limits.stopped_checks:
            return "its process is stopped (SIGSTOP)"
        if stopped:
            continue
        misses = 0 if await healthy() else misses + 1
        if misses >= limits.misses:
            return f"it missed {misses} health checks in a row"
