"""Progress of a rollout on stderr: one live line on a terminal or in a notebook, else a line every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import html
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from heddle_dask.views.history.reward_history import RewardTally

LIVE_INTERVAL_S = 0.25
PLAIN_INTERVAL_S = 5.0
_RATE_WINDOW_S = 10.0
_BAR_CHARS = 16
_JOINT = " · "
_SHARE_FOR_ESTIMATE = 0.1
_PLAIN_TICKS_PER_WAIT_LINE = 3


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rollout at one moment.

    Attributes
    ----------
    left_s
        Estimate from the pace so far; None until a tenth is done. It is too small while long trajectories remain.
    """

    done: int
    total: int
    running: int
    next: int  # steps at engines that have no slot yet
    queued: int
    in_tools: int
    failed: int
    tokens_per_s: float
    left_s: float | None
    waits_for: str = ""  # while there is no engine
    reward: str = ""  # in words

    @property
    def has_begun(self) -> bool:
        return bool(self.done or self.running or self.queued or self.in_tools)

    def line(self) -> str:
        return _JOINT.join(self._parts())

    def ended(self) -> Snapshot:
        """When nothing runs any more: the counts of what does are those of the last message."""
        return replace(self, running=0, next=0, queued=0, in_tools=0)

    def lines(self, width: int) -> list[str]:
        """The line in pieces of at most so many characters, broken between its parts."""
        found: list[str] = []
        for part in self._parts():
            if found and len(found[-1]) + len(_JOINT) + len(part) <= width:
                found[-1] += _JOINT + part
            else:
                found.append(part)
        return found

    def _parts(self) -> list[str]:
        parts = [
            f"done {self.done}/{self.total}",
            f"{self.running} running{f', {self.next} next' if self.next else ''}",
        ]
        counts = {"queued": self.queued, "in tools": self.in_tools, "failed": self.failed}
        parts += [f"{name} {count}" for name, count in counts.items() if count]
        if self.left_s is not None and self.done < self.total and not self.waits_for:
            parts.append(f"~{duration(self.left_s)} left")
        parts.append(f"{self.tokens_per_s:,.0f} tok/s")
        return [*parts, *filter(None, (self.reward, self.waits_for))]


class EndCounts(Protocol):
    """What is counted of ended trajectories."""

    @property
    def failed(self) -> int: ...

    @property
    def rewards(self) -> RewardTally: ...


class Meter:
    """Makes snapshots; rates and the time left are computed from earlier counts."""

    def __init__(
        self,
        total: int,
        tally: EndCounts,
        counts: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._tally = tally
        self._counts = counts
        self._clock = clock
        self._began_s: float | None = None
        self._tokens: deque[tuple[float, int]] = deque()

    def snapshot(self) -> Snapshot:
        counts = self._counts()
        now_s = self._clock()
        done = int(counts.get("finished", 0))
        if self._began_s is None and (counts.get("alive") or done):
            self._began_s = now_s
        told = f"no engine; {counts.get('engines_told', '')}".rstrip("; ")
        left_s = None
        if self._began_s is not None and done and done >= _SHARE_FOR_ESTIMATE * self._total:
            left_s = (now_s - self._began_s) * (self._total - done) / done
        ahead = int(counts.get("next", 0))
        return Snapshot(
            done=done,
            total=self._total,
            running=int(counts.get("generating", 0)) - ahead,
            next=ahead,
            queued=int(counts.get("queued", 0)),
            in_tools=int(counts.get("acting", 0)) + int(counts.get("actions_waiting", 0)),
            failed=self._tally.failed,
            tokens_per_s=self._rate(now_s, int(counts.get("tokens", 0))),
            left_s=left_s,
            reward=self._tally.rewards.view().line(),
            waits_for="" if counts.get("engines_ready", 1) else told,
        )

    def _rate(self, now_s: float, tokens: int) -> float:
        self._tokens.append((now_s, tokens))
        while len(self._tokens) > 2 and now_s - self._tokens[1][0] >= _RATE_WINDOW_S:
            self._tokens.popleft()
        then_s, before = self._tokens[0]
        return (tokens - before) / (now_s - then_s) if now_s > then_s else 0.0


class ProgressDisplay:
    """Prints messages, and snapshots of a meter while its context is open."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._latest = ""

    def message(self, text: str) -> None:
        """Print a message, unless it is the latest one again: runs that share a cluster wait for the same."""
        if text != self._latest:
            self._latest = text
            self._print([text])

    def show(self, snapshot: Snapshot) -> None:
        """Print how far it is, in lines that the terminal does not wrap."""
        self._print(snapshot.lines(self._console.width - len(self._elapsed())))

    @contextlib.asynccontextmanager
    async def following(self, meter: Meter) -> AsyncIterator[None]:
        follow = self._follow_live if self._console.is_terminal else self._follow_plain
        if is_notebook():
            follow = self._follow_in_notebook
        task = asyncio.create_task(follow(meter))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _follow_plain(self, meter: Meter) -> None:
        waits = 0
        while True:
            await asyncio.sleep(PLAIN_INTERVAL_S)
            snapshot = meter.snapshot()
            if snapshot.has_begun:
                self.show(snapshot)
                continue
            waits += 1
            if waits % _PLAIN_TICKS_PER_WAIT_LINE == 0:
                self._print([f"still waiting: {self._latest}"])

    async def _follow_live(self, meter: Meter) -> None:
        # What the user prints stays in the stream that it is printed to, unless all of it is this terminal.
        redirects = sys.stdout is not None and sys.stdout.isatty()
        with Live(console=self._console, transient=True, auto_refresh=False, redirect_stdout=redirects) as live:
            while True:
                snapshot = meter.snapshot()
                elapsed = duration(time.monotonic() - self._began_s)
                waiting = Text(f"{self._latest} · {elapsed}", overflow="ellipsis", no_wrap=True)
                line = Table.grid(padding=(0, 1))
                lines = snapshot.lines(self._console.width - _BAR_CHARS - 1)
                line.add_row(ProgressBar(snapshot.total, snapshot.done, width=_BAR_CHARS), "\n".join(lines))
                live.update(line if snapshot.has_begun else waiting, refresh=True)
                await asyncio.sleep(LIVE_INTERVAL_S)

    async def _follow_in_notebook(self, meter: Meter) -> None:
        from IPython.display import DisplayHandle

        def bar(snapshot: Snapshot) -> dict[str, str]:
            line = snapshot.line() if snapshot.has_begun else self._latest
            drawn = f'<progress max="{snapshot.total}" value="{snapshot.done}"></progress>'
            return {"text/plain": line, "text/html": f"{drawn} {html.escape(line)}"}

        shown = DisplayHandle()
        shown.display(bar(meter.snapshot()), raw=True)
        try:
            while True:
                await asyncio.sleep(LIVE_INTERVAL_S)
                shown.update(bar(meter.snapshot()), raw=True)
        finally:
            shown.update(bar(meter.snapshot().ended()), raw=True)

    def _elapsed(self) -> str:
        return f"[{time.monotonic() - self._began_s:6.1f} s] "

    def _print(self, lines: Sequence[str]) -> None:
        # While a live line is shown, the console prints above it.
        elapsed = self._elapsed()
        text = f"\n{' ' * len(elapsed)}".join(lines)
        self._console.print(f"{elapsed}{text}", highlight=False, markup=False, soft_wrap=True)


def is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


def duration(seconds: float) -> str:
    """Seconds in words: ``42 s``, ``3 min 10 s``, ``2 h 05 min``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
