"""Workers that are about to leave: what they hold goes first, then they are retired.

A job whose time is over, or a cluster that shrinks, asks for it (`DrainWorkers`). The controller moves trajectories
away; this is the part that tells it so, watches the time, and closes a worker when nothing is lost with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from distributed import Scheduler

from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId, HostId
from heddle_dask.live.scheduler.cluster_control import ClusterControl
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.cluster_messages import DrainedWorkers, DrainWorkers
from heddle_dask.live.wire.envelopes import UNSTAMPED
from heddle_dask.live.wire.messages import is_key_of

_LOG = logging.getLogger(__name__)
# Steps that still run so long before the end are stopped: their tokens are with the driver a moment later.
EXPIRING_S = 5.0
_LOOK_S = 0.02
_RETIRE_S = 30.0


@dataclass(slots=True)
class _Drain:
    name: str
    began_s: float
    ends_s: float  # when it must have left, on the monotonic clock
    control: str = ""  # name of the controller that there was when the drain began
    engines: tuple[EngineId, ...] = ()
    # Its engines and hosts that this controller has not released.
    holding: set[str] = field(default_factory=set)
    left: bool = False  # whether it has left the cluster
    task: asyncio.Task[None] | None = None

    @property
    def expires_s(self) -> float:
        """When its steps are stopped."""
        return self.ends_s - min(EXPIRING_S, (self.ends_s - self.began_s) / 3)


class WorkerDrains:
    def __init__(
        self,
        registry: EngineRegistry,
        control: Callable[[], ClusterControl | None],  # what steers the open sessions, if there are any
        forget: Callable[[str], None],  # takes the address of a worker that hosts no further engine
    ) -> None:
        self._registry = registry
        self._control = control
        self._forget = forget
        self._drains: dict[str, _Drain] = {}
        self.scheduler: Scheduler | None = None

    def __contains__(self, worker: object) -> bool:
        return worker in self._drains

    async def drain(self, request: DrainWorkers) -> DrainedWorkers:
        """Drain workers and retire them; answered when they have left, or when their time is over."""
        assert self.scheduler is not None
        now_s = time.monotonic()
        ends_s = now_s + request.ends_in_s
        wanted = set(request.names)
        mine = [
            self._begin(a, str(ws.name), ends_s)
            for a, ws in list(self.scheduler.workers.items())
            if str(ws.name) in wanted
        ]
        tasks = [drain.task for drain in mine if drain.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        late = tuple(drain.name for drain in mine if not drain.left)
        return DrainedWorkers(tuple(name for name in request.names if name not in late), late)

    def _begin(self, worker: str, name: str, ends_s: float) -> _Drain:
        drain = self._drains.get(worker)
        if drain is not None:
            drain.ends_s = min(drain.ends_s, ends_s)
            return drain
        drain = self._drains[worker] = _Drain(name, time.monotonic(), ends_s)
        self._forget(worker)
        control = self._open()
        if control is not None:
            engines = [name for name, (address, _) in self._registry.engines.items() if address == worker]
            hosts = [name for name, (address, _) in self._registry.hosts.items() if address == worker]
            drain.control, drain.engines = control.name, tuple(engines)
            drain.holding.update(engines, hosts)
            for engine_id in engines:
                control.engine_draining(engine_id, ends_s - time.monotonic())
            for host_id in hosts:
                control.tell(ev.HostDraining(UNSTAMPED, host_id))
        drain.task = asyncio.create_task(self._see_off(worker, drain))
        return drain

    def _open(self) -> ClusterControl | None:
        control = self._control()
        if control is None or control.failure is not None or not control.open_sessions:
            return None
        return control

    def released(self, holder: EngineId | HostId) -> None:
        """The controller has nothing any more on this engine or host."""
        for drain in self._drains.values():
            drain.holding.discard(holder)

    def worker_left(self, worker: str) -> None:
        """A worker has left the cluster, drained or not."""
        drain = self._drains.pop(worker, None)
        if drain is not None:
            drain.left = True

    async def _see_off(self, worker: str, drain: _Drain) -> None:
        try:
            await self._until_empty(worker, drain)
            if not drain.left and not self._is_busy(worker, drain):
                await self._retire(worker, drain)
        except OSError:
            _LOG.exception("worker %s was not drained", drain.name)  # it is lost as without a drain
        except Exception:
            _LOG.exception("worker %s was not drained", drain.name)
            control = self._open()
            if control is not None:
                control.latch(traceback.format_exc())

    async def _until_empty(self, worker: str, drain: _Drain) -> None:
        """Wait until a worker has nothing that would be lost, or until its time is over."""
        expired = False
        while not drain.left and self._is_busy(worker, drain) and time.monotonic() < drain.ends_s:
            control = self._open()
            if not expired and control is not None and time.monotonic() >= drain.expires_s:
                expired = True
                for engine_id in drain.engines:
                    if engine_id in drain.holding:
                        control.tell(ev.EngineExpiring(UNSTAMPED, engine_id))
            await asyncio.sleep(_LOOK_S)

    def _is_busy(self, worker: str, drain: _Drain) -> bool:
        """Whether a session needs the worker: what it holds, what runs there, or results that its driver lacks."""
        assert self.scheduler is not None
        control = self._open()
        if control is None:
            return False
        if drain.holding and drain.control == control.name:
            return True
        names = control.session_ids
        tasks = dask.tasks_at(self.scheduler, worker)
        return any(is_key_of(name, key) for key in tasks for name in names)

    async def _retire(self, worker: str, drain: _Drain) -> None:
        assert self.scheduler is not None
        left_s = max(1.0, min(_RETIRE_S, drain.ends_s - time.monotonic()))
        retired = self.scheduler.retire_workers(
            workers=[worker], close_workers=True, remove=True, stimulus_id=f"heddle-drained-{worker}"
        )
        try:
            await asyncio.wait_for(retired, left_s)
        except TimeoutError:
            # A result of another client that no other worker may hold.
            _LOG.warning("worker %s holds results that nothing else takes", drain.name)

    def close(self) -> None:
        for drain in self._drains.values():
            if drain.task is not None:
                drain.task.cancel()
