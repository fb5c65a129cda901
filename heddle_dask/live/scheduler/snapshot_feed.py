"""The one picture of the run that page, metrics and terminals draw from: taken at most once per interval.

It is taken when a view asks and the latest one is older than the interval. So ten open tabs cost what one costs, and
without a view no picture is taken at all. All of it happens on the scheduler's event loop, between two
events, so that a picture never shows half of one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import count
from typing import Any, Final

from heddle_dask.core.commands import Command
from heddle_dask.core.events import Event
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.views.history.history_pictures import PictureLimits, picture_of
from heddle_dask.views.history.run_history import RunHistory
from heddle_dask.views.history.run_shares import RunShare
from heddle_dask.views.history.run_snapshot import EngineView, PoolView, RunSnapshot

INTERVAL_S: Final = 1.0
# Who asks once per interval asks now and then a little early, and must not see every second picture only.
_EARLY_S: Final = 0.05

_LOG = logging.getLogger(__name__)


class WatchedSession:
    """The history of the sessions of one controller, fed with everything that it handles.

    A defect here must not stop a rollout: after a failure, which is logged, the history stays as it was.
    """

    def __init__(
        self, session_id: str, strategy: str, clock_s: Callable[[], float], name: str = "", environment: str = ""
    ) -> None:
        self.session_id = session_id
        self.name = name
        self.environment = environment
        self.strategy = strategy
        self.history = RunHistory()
        self.is_open = True
        self.lines_missing = 0  # events that the history did not take, because it had failed
        self.runs: Callable[[], tuple[RunShare, ...]] = tuple  # the sessions that are open now
        self._clock_s = clock_s
        self._closed_at_s = 0.0

    def take(self, event: Event, commands: Sequence[Command]) -> None:
        if self.lines_missing:
            self.lines_missing += 1
            return
        try:
            self.history.take(event, commands)
        except Exception:
            self.lines_missing = 1
            _LOG.exception("the history of session %s stops: %r", self.session_id, event)

    @property
    def now_s(self) -> float:
        """Seconds of the session; of one that has ended: at its end."""
        return self._clock_s() if self.is_open else self._closed_at_s

    def close(self) -> None:
        """The session has ended; what happened stays visible until the next one begins."""
        if self.is_open:
            self._closed_at_s = self._clock_s()
            self.is_open = False


class SnapshotFeed:
    """Pictures of the cluster and its latest session."""

    def __init__(
        self,
        registry: EngineRegistry,
        limits: PictureLimits | None = None,
        interval_s: float = INTERVAL_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = interval_s
        # `taken`, `spent_s`: number of pictures taken so far, and the seconds of the event loop that they took.
        self.taken = 0
        self.spent_s = 0.0
        # Requests of agents that have come, and those that are open.
        self.agents: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._registry = registry
        self._limits = limits or PictureLimits()
        self._clock_s = clock_s
        self._watched = WatchedSession("", "", lambda: 0.0)
        self._watched.close()
        self._version = version("heddle-dask")
        self._latest: RunSnapshot | None = None
        self._latest_at_s = 0.0
        self._json: dict[str, Any] | None = None

    def watch(
        self, session_id: str, strategy: str, clock_s: Callable[[], float], name: str = "", environment: str = ""
    ) -> WatchedSession:
        """Begin the history of a new session, in place of the one before."""
        self._watched.close()
        self._watched = WatchedSession(session_id, strategy, clock_s, name, environment)
        self._latest = None
        return self._watched

    @property
    def history(self) -> RunHistory:
        """The history of the latest session; it changes with every event."""
        return self._watched.history

    def latest(self) -> RunSnapshot:
        now_s = self._clock_s()
        if self._latest is None or now_s - self._latest_at_s >= self.interval_s - _EARLY_S:
            self._latest, self._json, self._latest_at_s = self._take(), None, now_s
            self.taken += 1
            self.spent_s += self._clock_s() - now_s
        return self._latest

    def latest_json(self) -> dict[str, Any]:
        """The same picture as `latest`, JSON-able; converted once."""
        snapshot = self.latest()
        if self._json is None:
            began_s = self._clock_s()
            self._json = snapshot.as_json()
            self.spent_s += self._clock_s() - began_s
        return self._json

    def _take(self) -> RunSnapshot:
        watched = self._watched
        snapshot = picture_of(
            watched.history,
            session=watched.session_id,
            is_open=watched.is_open,
            strategy=watched.strategy,
            now_s=watched.now_s,
            name=watched.name,
            environment=watched.environment,
            runs=watched.runs() if watched.is_open else (),
            lines_missing=watched.lines_missing,
            taken_unix_s=time.time(),
            heddle_version=self._version,
            limits=self._limits,
        )
        if watched.is_open:
            return snapshot
        # No session is told of engines and hosts now: those of the registry are there.
        return replace(snapshot, engines=self._engines(), pools=self._pools())

    def _engines(self) -> tuple[EngineView, ...]:
        engines = self._watched.history.engines
        unknown = count(engines.joined_count)
        return tuple(
            EngineView(
                index=row.index if (row := engines.rows.get(spec.engine_id)) else next(unknown),
                seat=seat,
                engine_id=spec.engine_id,
                state="ready",
                tp_degree=spec.tp_degree,
                slots=spec.slots,
                generating=0,
                queued=0,
                resident_tokens=0,
                kv_capacity_tokens=spec.kv_capacity_tokens,
                steps=row.steps if row else 0,
                generated_tokens=row.generated_tokens if row else 0,
                joined_s=row.joined_s if row else 0.0,
            )
            for seat, (_, spec) in enumerate(self._registry.engines.values())
        )

    def _pools(self) -> tuple[PoolView, ...]:
        hosts = [spec for _, spec in self._registry.hosts.values()]
        cpus: Counter[str] = Counter()
        for spec in hosts:
            cpus[spec.pool] += spec.cpus
        counts = Counter(spec.pool for spec in hosts)
        return tuple(PoolView(pool, counts[pool], cpus[pool], cpus[pool], 0, 0) for pool in counts)
