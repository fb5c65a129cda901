"""Closes the sandboxes that a session leaves on its hosts: its driver may have died."""

from __future__ import annotations

from distributed import Scheduler

from heddle_dask.core.commands import CloseSandbox
from heddle_dask.core.run_record import plain_name
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.scheduler.session import Session
from heddle_dask.live.wire.envelopes import Order
from heddle_dask.live.wire.transport import send


class OpenSandboxes:
    """The sandboxes of one session."""

    def __init__(self, scheduler: Scheduler, session: Session, registry: EngineRegistry) -> None:
        self._scheduler = scheduler
        self._session = session
        self._registry = registry

    def close(self) -> None:
        """Tell the hosts; a second call changes nothing."""
        for place in self._session.controller.state.sandboxes.values():
            run_id, name = plain_name(place.name)
            if run_id != self._session.run.run_id:
                continue
            if place.host in self._registry.hosts:
                address, _ = self._registry.hosts[place.host]
                order = Order(self._session.session_id, CloseSandbox(place.host, name))
                send(self._scheduler, order, address)
