"""Workers that are silent: told to the drivers first, and then lost, so that their work goes on elsewhere.

A process that is stopped, or whose event loop is blocked, keeps its connections: only its heartbeats, which Dask has
anyway, show it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from distributed import Scheduler

from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.driver_messages import WorkerSilenceNotice
from heddle_dask.live.wire.messages import ENGINE_RESOURCE, MODEL_RESOURCE, TOOL_RESOURCE, TRAINER_RESOURCE
from heddle_dask.live.wire.transport import Failed, guarded

_LOOK_S = 1.0
# Shorter is no silence: heartbeats come less often where there are many workers.
_HEARTBEATS = 4
_TAGS = {ENGINE_RESOURCE, TOOL_RESOURCE, MODEL_RESOURCE, TRAINER_RESOURCE}


@dataclass(slots=True)
class _Heard:
    heartbeat_s: float
    silent_s: float = 0.0
    told: bool = False
    lost: bool = False


class Silences:
    """How long each worker has been silent, counted in looks.

    A look adds little, however late it is: a scheduler that was suspended itself has heard nobody meanwhile.
    """

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}
        self._looked_s = 0.0

    def look(
        self, heartbeats: Mapping[str, float], now_s: float, told_s: float, lost_s: float
    ) -> list[tuple[str, float, bool]]:
        """The workers of which there is news: address, seconds of silence (0: it answers again), whether it is lost.

        Parameters
        ----------
        heartbeats
            When each worker was last heard of, on any clock.
        told_s, lost_s
            A silence as long is told, or ends with the worker.
        """
        passed_s = min(now_s - self._looked_s, 2 * _LOOK_S)
        self._looked_s = now_s
        news: list[tuple[str, float, bool]] = []
        for address, heartbeat_s in heartbeats.items():
            heard = self._heard.get(address)
            if heard is None or heard.heartbeat_s != heartbeat_s:
                self._heard[address] = _Heard(heartbeat_s)
                if heard is not None and heard.told and not heard.lost:
                    news.append((address, 0.0, False))
                continue
            heard.silent_s += passed_s
            lost = heard.silent_s >= lost_s
            if (lost and not heard.lost) or (heard.silent_s >= told_s and not heard.told):
                heard.told, heard.lost = True, lost
                news.append((address, lost_s if lost else told_s, lost))
        self._heard = {address: heard for address, heard in self._heard.items() if address in heartbeats}
        return news


class WorkerWatch:
    """Looks at the workers while sessions are open."""

    def __init__(self, sessions: Callable[[], Sequence[Session]], failed: Failed) -> None:
        self._sessions = sessions
        self._failed = failed
        self._silences = Silences()
        self._watching: asyncio.Task[None] | None = None
        self._losing: set[asyncio.Task[None]] = set()

    def start(self, scheduler: Scheduler) -> None:
        """Look once a second from now on."""
        self._watching = asyncio.create_task(self._watch(scheduler))

    def close(self) -> None:
        """The scheduler ends."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, scheduler: Scheduler) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            with guarded("the watch over the workers", "", self._failed):
                self._look(scheduler)

    def _look(self, scheduler: Scheduler) -> None:
        sessions = self._sessions()
        if not sessions:
            return
        lost_s = max(session.silence_s for session in sessions)
        least_s = _HEARTBEATS * dask.heartbeat_interval_s(scheduler)
        told_s = max(least_s, min(dask.SILENT_S, lost_s / 2))
        news = self._silences.look(
            dask.heartbeats(scheduler, _TAGS), time.monotonic(), told_s, max(least_s, lost_s)
        )
        for address, silent_s, lost in news:
            for session in sessions:
                session.notify(WorkerSilenceNotice(str(scheduler.workers[address].name), silent_s, lost))
            if lost:
                losing = asyncio.create_task(dask.restart_worker(scheduler, address))
                self._losing.add(losing)
                losing.add_done_callback(self._losing.discard)
