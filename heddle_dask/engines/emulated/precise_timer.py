"""An event loop timer with a delay of tens of microseconds instead of a millisecond.

Event loops round their timeouts up to whole milliseconds. An engine that takes the time of a cost model must not add
that to every step, so this timer is a Linux timerfd that the loop watches like a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable

_TFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


_libc = ctypes.CDLL(None, use_errno=True)


class PreciseTimer:
    """Calls back once at a set time; belongs to the running event loop.

    Parameters
    ----------
    callback
        Called in the event loop, never before the set time.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._fd = _checked(_libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS))
        self._loop.add_reader(self._fd, self._fired)

    def set(self, at_s: float) -> None:
        """Call back at `at_s` of ``time.monotonic()``, at once when that is past; replaces the previous time."""
        # A value of zero would disarm the timer.
        at_ns = max(1, round(at_s * 1e9))
        self._settime(at_ns)

    def cancel(self) -> None:
        """Do not call back."""
        self._settime(0)

    def close(self) -> None:
        """Free the kernel's timer; the object cannot be used afterwards."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _settime(self, at_ns: int) -> None:
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(at_ns, 1_000_000_000)))
        _checked(_libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None))

    def _fired(self) -> None:
        # When the timer was set again since the wake-up there is nothing to read; it fires at the new time.
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
            self._callback()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
