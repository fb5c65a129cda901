"""The page of the dashboard on a scheduler without workers: a simulated rollout is played to it.

For looking at the page with thousands of trajectories, and for the images of the documentation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from benchmarks.dashboard_run import PRESET, Pair
from heddle_dask.core import events as ev
from heddle_dask.live.scheduler.dashboard.registration import TAB, register
from heddle_dask.views.history.history_pictures import picture_of
from heddle_dask.views.history.run_history import RunHistory
from heddle_dask.views.history.run_snapshot import RunSnapshot

INTERVAL_S = 1.0


class PlayedRun:
    """Events of a rollout, taken by a history up to a moment of the rollout's own time.

    Parameters
    ----------
    clock_s
        The moment of the rollout to show; never goes back.
    """

    def __init__(self, pairs: Sequence[Pair], clock_s: Callable[[], float]) -> None:
        self.pairs = pairs
        self.history = RunHistory()
        self._clock_s = clock_s
        self._latest: RunSnapshot | None = None
        self._taken_s = 0.0

    def ended_s(self, share: float) -> float:
        """When so large a share of the trajectories has ended."""
        ends_s = [event.at for event, _ in self.pairs if isinstance(event, ev.TrajectoryEnded)]
        return ends_s[max(0, round(share * len(ends_s)) - 1)] if ends_s else 0.0

    def latest(self) -> RunSnapshot:
        """The picture of this interval, as the scheduler's feed."""
        now_s = time.monotonic()
        if self._latest is None or now_s - self._taken_s >= INTERVAL_S:
            taken = self.at(self._clock_s())
            if self._latest is not None and replace(taken, taken_unix_s=self._latest.taken_unix_s) == self._latest:
                return self._latest
            self._latest, self._taken_s = taken, now_s
        return self._latest

    def at(self, moment_s: float) -> RunSnapshot:
        """A picture of that moment."""
        self.advance(moment_s)
        return picture_of(
            self.history,
            session="simulated" if self.pairs else "",
            is_open=True,
            strategy=PRESET,
            now_s=moment_s,
            taken_unix_s=time.time(),
        )

    def advance(self, moment_s: float) -> None:
        """Have the history take everything up to that moment."""
        taken = self.history.events
        while taken < len(self.pairs) and self.pairs[taken][0].at <= moment_s:
            self.history.take(*self.pairs[taken])
            taken += 1


class _Demo(SchedulerPlugin):
    """Stands where the plugin of a real rollout is."""

    name = "heddle"

    def __init__(self, snapshots: PlayedRun) -> None:
        self.snapshots = snapshots


@contextlib.asynccontextmanager
async def demo_dashboard(run: PlayedRun, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """Serve the page; yields its URL."""
    register()
    async with Scheduler(host="127.0.0.1", port=0, dashboard=True, dashboard_address=address) as scheduler:
        scheduler.add_plugin(_Demo(run), name=_Demo.name)
        yield f"http://127.0.0.1:{scheduler.http_server.port}{TAB}"
