"""What a feed of groups uses of an open session and its driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributed import Client

from heddle_dask.core.events import GroupEnded, TrajectoryRedundant
from heddle_dask.live.driver.runs.runner import Driver
from heddle_dask.live.driver.session.open_session import OpenSession
from heddle_dask.live.wire.envelopes import Report
from heddle_dask.live.wire.transport import send
from heddle_dask.records.trajectory import Cause


@dataclass(frozen=True, slots=True)
class LiveGroupPort:
    """Implements `group_feed.GroupPort`."""

    client: Client
    open_session: OpenSession
    driver: Driver

    @property
    def waiting(self) -> int:
        """See the protocol."""
        return self.driver.waiting

    @property
    def slots(self) -> int:
        """See the protocol."""
        return int(self.open_session.channel.counts.get("slots", 0))

    @property
    def quarantined(self) -> Mapping[str, str]:
        """See the protocol."""
        return self.driver.failures.quarantined

    def quarantine(self, task_id: str, message: str) -> None:
        """See the protocol."""
        self.driver.failures.quarantine(task_id, message)

    def cancel(self, trajectory_id: str, cause: Cause) -> None:
        """See the protocol."""
        self.driver.cancel(trajectory_id, cause)

    def report(self, event: GroupEnded | TrajectoryRedundant) -> None:
        """See the protocol."""
        if self.client.status == "running":
            send(self.client, Report(self.open_session.session_id, event))

    def look_again(self) -> None:
        """See the protocol."""
        self.driver.look_again()
