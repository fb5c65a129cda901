"""Signals during a rollout: the first asks for an orderly end, the second ends this process at once.

The second leaves no orphans: watchdogs end engines and workers when this process ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from heddle_dask.cli.one_line import EXIT_INTERRUPTED, EXIT_TERMINATED

_EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}
_SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """Watches SIGINT and SIGTERM of this process.

    Parameters
    ----------
    on_first
        Called once, on the event loop.

    Attributes
    ----------
    exit_code
        That of the first signal; 0 before.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self.exit_code = 0

    def watch(self) -> None:
        """Take the signals over; the running loop gives them back when it closes."""
        loop = asyncio.get_running_loop()
        for number in _EXIT_CODES:
            loop.add_signal_handler(number, self._first, number)

    def _first(self, number: signal.Signals) -> None:
        if self.exit_code:
            _exit_at_once(number)
        self.exit_code = _EXIT_CODES[number]
        for other in _EXIT_CODES:
            # From here on without the loop: "at once" must hold when something blocks it.
            signal.signal(other, _exit_at_once)
        self._on_first()


def _exit_at_once(number: int, frame: FrameType | None = None) -> None:
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR.encode())
    os._exit(_EXIT_CODES[signal.Signals(number)])
