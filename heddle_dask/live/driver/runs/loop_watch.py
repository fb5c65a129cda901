"""Names the program that blocks the driver's event loop: no other program goes on meanwhile, and no timer fires."""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

LOOK_S = 1.0
HELD_LOOKS = 10
"""Looks in a row to which the loop has not answered: then it is told. A machine that slept counts as one."""

_NOT_THE_USERS = tuple(
    f"{each}/" for each in (Path(__file__).parents[3], *map(sysconfig.get_path, ("stdlib", "purelib")))
)


class LoopWatch:
    """Looks at the running loop from a thread, as long as the context is open.

    Parameters
    ----------
    note
        Takes the line; called in that thread, since the loop does nothing.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._ended = threading.Event()
        self._answered = True

    def __enter__(self) -> LoopWatch:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._look, args=(loop, thread), name="heddle-loop-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _answer(self) -> None:
        self._answered = True

    def _look(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        held = 0
        while not self._ended.wait(LOOK_S):
            if self._answered:
                held, self._answered = 0, False
                try:
                    loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # the loop is closed
                    return
                continue
            held += 1
            frame = sys._current_frames().get(thread)
            if held == HELD_LOOKS and frame is not None:
                task = asyncio.current_task(loop)
                self._note(held_line("" if task is None else task.get_name(), frame, held * LOOK_S))


def held_line(name: str, frame: FrameType, held_s: float) -> str:
    """One line that names the task and the place: the innermost code of the user, if there is any."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code.co_filename.startswith(_NOT_THE_USERS):
        outer = outer.f_back
    at = frame if outer is None else outer
    where = f"{at.f_code.co_filename}:{at.f_lineno}, in {at.f_code.co_name}"
    held = f"{name or 'a callback'} holds the event loop of the driver for {held_s:.0f} s ({where})"
    return f"{held}: no other program goes on; use await ctx.call(function), or asyncio.to_thread(function)"
