"""Whether a process still answers: one that is stopped, or whose event loop hangs, keeps its connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Tell = Callable[[str], None]
"""Takes a line for the user: that something has not answered for a while, or answers again."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    interval_s: float = 2.0  # from one check to the next, where the first is answered sooner
    misses: int = 12  # checks in a row without an answer after which it is lost: a minute where each takes its time
    # The same where a process is found stopped (SIGSTOP): a health check would take its whole time limit.
    stopped_checks: int = 4
    check_s: float = 5.0  # limit of one check
    told_s: float = 10.0  # a silence of so long is told


USUAL = HealthLimits()


async def until_silent(
    name: str, healthy: Callable[[], Awaitable[bool]], is_stopped: Callable[[], bool], limits: HealthLimits, tell: Tell
) -> str:
    """Check until the process answers no more; returns why, in words that follow its name."""
    misses = stopped = 0
    took_s = silent_s = 0.0
    told = False
    while True:
        await asyncio.sleep(max(0.0, limits.interval_s - took_s))
        took_s = 0.0
        stopped = stopped + 1 if is_stopped() else 0
        if stopped >= limits.stopped_checks:
            return "its process is stopped (SIGSTOP)"
        if stopped:
            continue
        began_s = time.monotonic()
        try:
            answered = await asyncio.wait_for(healthy(), limits.check_s)
        except TimeoutError:
            answered = False
        if answered:
            if told:
                tell(f"{name} answers again")
            misses, silent_s, told = 0, 0.0, False
            continue
        took_s = time.monotonic() - began_s
        misses += 1
        # One check adds little, however late it is: this process may have been suspended itself.
        silent_s += min(max(took_s, limits.interval_s), limits.check_s)
        if misses >= limits.misses:
            return f"it missed {misses} health checks in a row"
        if silent_s >= limits.told_s and not told:
            told = True
            tell(f"{name} has not answered for {limits.told_s:g} s")
