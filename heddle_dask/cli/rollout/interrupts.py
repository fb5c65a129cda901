"""Signals during a rollout: the first asks for an orderly end, a second SIGINT or SIGTERM ends this process at once.

SIGINT is of a user who has seen enough: what runs is stored as aborted. SIGTERM and SIGUSR1 are of a batch system whose
time is over: what runs is left to the next job, which resumes the run.

The second signal leaves no orphans: the watchdog of each engine and worker ends it when this process dies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from heddle_dask.cli.one_line import EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_TO_RESUME

_EXIT_CODES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGUSR1: EXIT_TO_RESUME,
}
_SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """Watches SIGINT, SIGTERM and SIGUSR1 of this process.

    Parameters
    ----------
    on_first
        Called once, on the event loop; takes whether the run is to be resumed.

    Attributes
    ----------
    exit_code
        Exit code for the first signal; 0 before any.
    """

    def __init__(self, on_first: Callable[[bool], None]) -> None:
        self._on_first = on_first
        self.exit_code = 0

    def watch(self) -> None:
        """Install the signal handlers; the running loop removes them when it closes."""
        loop = asyncio.get_running_loop()
        for number in _EXIT_CODES:
            loop.add_signal_handler(number, self._first, number)

    def _first(self, number: signal.Signals) -> None:
        if self.exit_code:
            _exit_at_once(number)
        self.exit_code = _EXIT_CODES[number]
        for other in (signal.SIGINT, signal.SIGTERM):
            # Without the event loop: the second signal must work even if the loop is blocked.
            signal.signal(other, _exit_at_once)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._on_first(number != signal.SIGINT)


def _exit_at_once(number: int, frame: FrameType | None = None) -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
    os._exit(_EXIT_CODES[signal.Signals(number)])
