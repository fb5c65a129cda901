"""An API in virtual time: it enforces its quota, takes its latency, and fails now and then."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from heddle_dask.core.quotas import RATE_LIMITED, UNAVAILABLE, CountedCall, SlidingWindow
from heddle_dask.core.resources import QuotaWindow
from heddle_dask.sim.loop import VirtualTime

Answered = Callable[[str], None]
"""Called with the cause of an answer: empty for a result, otherwise as in `ActionFinished`."""


@dataclass(frozen=True, slots=True)
class ApiTraits:
    """How an API behaves.

    Attributes
    ----------
    concurrency, windows
        Its quota (`ApiQuota`).
    overload
        What it does with a call over the quota: ``"reject"`` it at once (status 429), or ``"queue"`` it, so that it
        takes its turn even when nobody waits for the answer any more.
    latency_s, latency_sigma
        Median and shape of the lognormal time of an answer.
    error_rate
        Share of calls that fail after half of that time.
    counts_rejected
        Whether a rejected call counts against the windows.
    """

    concurrency: int = 0
    windows: tuple[QuotaWindow, ...] = ()
    overload: Literal["reject", "queue"] = "reject"
    latency_s: float = 1.0
    latency_sigma: float = 0.5
    error_rate: float = 0.01
    counts_rejected: bool = False


class SimulatedApi:
    """Answers calls, in the order in which they come.

    Attributes
    ----------
    calls, rejected, served
        Numbers of all calls, of those over the quota, and of those that were worked on.
    """

    def __init__(self, traits: ApiTraits, time: VirtualTime, seed: int) -> None:
        self.traits = traits
        self.calls = self.rejected = self.served = 0
        self._time = time
        self._random = random.Random(seed)
        self._windows = [SlidingWindow(window) for window in traits.windows]
        self._queue: deque[Answered] = deque()
        self._running = 0
        self._looks_at_s: float | None = None

    def call(self, answered: Answered) -> None:
        """Take a call, and answer it later."""
        self.calls += 1
        if self._free():
            self._serve(answered)
        elif self.traits.overload == "queue":
            self._queue.append(answered)
            self._look_again()
        else:
            self.rejected += 1
            if self.traits.counts_rejected:
                self._count()
            self._time.after(0.0, answered, RATE_LIMITED)

    def _free(self) -> bool:
        for window in self._windows:
            window.advance(self._time.now_s)
        busy = self.traits.concurrency and self._running >= self.traits.concurrency
        return not busy and all(window.counted < window.most for window in self._windows)

    def _count(self) -> None:
        for window in self._windows:
            window.add(CountedCall(self._time.now_s, 1))

    def _serve(self, answered: Answered) -> None:
        self._count()
        self._running += 1
        self.served += 1
        fails = self._random.random() < self.traits.error_rate
        latency_s = self.traits.latency_s * self._random.lognormvariate(0.0, self.traits.latency_sigma)
        self._time.after(latency_s / 2 if fails else latency_s, self._answer, answered, UNAVAILABLE if fails else "")

    def _answer(self, answered: Answered, cause: str) -> None:
        self._running -= 1
        answered(cause)
        self._look_again()

    def _woken(self) -> None:
        self._looks_at_s = None
        self._look_again()

    def _look_again(self) -> None:
        while self._queue and self._free():
            self._serve(self._queue.popleft())
        if self._queue and self._looks_at_s is None:
            frees = [window.frees_s(1) for window in self._windows if window.counted >= window.most]
            times = [each for each in frees if each is not None]
            if times:
                self._looks_at_s = max(times)
                self._time.at(self._looks_at_s, self._woken)
