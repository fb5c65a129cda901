"""Workers that are silent: told to the drivers first, and then lost, so that their work goes on elsewhere.

A process that is stopped, or whose event loop is blocked, keeps its connections: only its heartbeats show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from distributed import Scheduler

from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.driver_messages import ProgressNotice
from heddle_dask.live.wire.messages import ENGINE_RESOURCE, MODEL_RESOURCE, TOOL_RESOURCE, TRAINER_RESOURCE

LOOK_S = 1.0
# A shorter limit is no silence: heartbeats come less often where there are many workers.
_HEARTBEATS = 4
_TAGS = {ENGINE_RESOURCE, TOOL_RESOURCE, MODEL_RESOURCE, TRAINER_RESOURCE}


@dataclass(slots=True)
class _Heard:
    heartbeat_s: float
    silent_s: float = 0.0
    told_s: float = 0.0
    lost: bool = False


class WorkerWatch:
    """How long each worker has been silent, counted in looks.

    A look adds little, however late it is: a scheduler that was suspended itself has heard nobody meanwhile.
    """

    def __init__(self, sessions: Callable[[], Sequence[Session]]) -> None:
        self._sessions = sessions
        self._heard: dict[str, _Heard] = {}
        self._looked_s = 0.0
        self._told_s: dict[str, float] = {}

    def look(self, scheduler: Scheduler) -> None:
        """Tell the open sessions of silent workers, and lose those that are silent for too long."""
        sessions = self._sessions()
        if not sessions:
            return
        least_s = _HEARTBEATS * dask.heartbeat_interval(len(scheduler.workers))
        lost_s = max(least_s, *(session.silence_s for session in sessions))
        limits_s = max(least_s, min(dask.SILENT_S, lost_s / 2)), lost_s
        for address, silent_s in self.news(dask.heartbeats(scheduler, _TAGS), time.monotonic(), limits_s):
            line = f"worker {scheduler.workers[address].name} "
            line += f"has not answered for {silent_s:g} s" if silent_s else "answers again"
            if silent_s >= lost_s:
                line += ": it is lost, and its work goes on elsewhere"
                self._heard[address].lost = True
                scheduler.loop.add_callback(dask.restart_worker, scheduler, address)
            for session in sessions:
                session.notify(ProgressNotice(line))

    def died(self, address: str, name: str) -> None:
        """Tell the open sessions of a worker that is gone with what ran there, but if it was lost for its silence."""
        heard = self._heard.get(address)
        if heard is None or not heard.lost:
            self.tell(f"worker {name} is gone: its work goes on elsewhere")

    def tell(self, line: str) -> None:
        """Tell the open sessions what a worker says; what several of them say at about the same time is told once."""
        now_s = time.monotonic()
        self._told_s = {told: at_s for told, at_s in self._told_s.items() if now_s - at_s < dask.SILENT_S}
        if line not in self._told_s:
            self._told_s[line] = now_s
            for session in self._sessions():
                session.notify(ProgressNotice(line))

    def news(
        self, heartbeats: Mapping[str, float], now_s: float, limits_s: Sequence[float]
    ) -> Iterator[tuple[str, float]]:
        """Workers whose silence has reached one of the limits, with that limit; with 0, one that answers again."""
        passed_s = min(now_s - self._looked_s, 2 * LOOK_S)
        self._looked_s = now_s
        before, self._heard = self._heard, {}
        for address, heartbeat_s in heartbeats.items():
            heard = before.get(address, _Heard(heartbeat_s, -passed_s))
            if heard.heartbeat_s != heartbeat_s:
                if heard.told_s:
                    yield address, 0.0
                heard = _Heard(heartbeat_s, -passed_s)
            self._heard[address] = heard
            heard.silent_s += passed_s
            reached_s = max((limit for limit in limits_s if heard.silent_s >= limit), default=0.0)
            if reached_s > heard.told_s:
                heard.told_s = reached_s
                yield address, reached_s
