"""A session of the scheduler without a cluster: its controller, and events that are fed to it."""

from __future__ import annotations

from heddle_dask.core.events import Event
from heddle_dask.core.run_description import RetryPolicy, RunDescription
from heddle_dask.live.scheduler.cluster_control import ClusterControl
from heddle_dask.live.scheduler.session import Session
from heddle_dask.strategies.described import strategies_of_description


class LoneSession:
    """A session in a controller; carries out nothing."""

    def __init__(self, control: ClusterControl, name: str, run: RunDescription) -> None:
        self.control = control
        self.session = Session(name, f"client of {name}", control.controller, control.now, run)
        control.join(self.session)

    def feed(self, event: Event) -> None:
        self.control.feed(self.session.names.qualify(event))


def first_session(run: RunDescription) -> LoneSession:
    """A controller with one session, which is of that description."""
    control = ClusterControl("s", strategies_of_description(run), RetryPolicy())
    assert control.next_run() == run.run_id
    return LoneSession(control, "s", run)
