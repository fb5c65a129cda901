"""Announces trajectories to the scheduler, and waits until each is admitted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from distributed import Client

from heddle_dask.live.driver.connection.control_channel import ClusterLost, ControlChannel
from heddle_dask.live.driver.programs.attempts import Attempt
from heddle_dask.live.wire.driver_messages import SubmitTrajectories
from heddle_dask.live.wire.transport import ask_scheduler

# Trajectories in one message: the scheduler answers polls in between.
SUBMITTED_AT_ONCE = 1000


class Announcer:
    def __init__(
        self,
        client: Client,
        session: str,
        channel: ControlChannel,
        on_admitted: Callable[[], None],  # called when a trajectory was admitted
    ) -> None:
        self._client = client
        self._session = session
        self._channel = channel
        self._on_admitted = on_admitted
        self._admitted: dict[str, asyncio.Event] = {}

    def expect(self, attempts: Sequence[Attempt]) -> None:
        """These will be announced: their programs may wait for their admission from now on."""
        for attempt in attempts:
            self._admitted[attempt.spec.trajectory_id] = asyncio.Event()

    async def announce(self, attempts: Sequence[Attempt]) -> None:
        """Tell the scheduler of expected trajectories.

        Raises
        ------
        ClusterLost
            The scheduler does not answer.
        ControlPlaneFailed
        """
        submitted = tuple(attempt.submitted() for attempt in attempts)
        for start in range(0, len(submitted), SUBMITTED_AT_ONCE):
            part = submitted[start : start + SUBMITTED_AT_ONCE]
            try:
                request = ask_scheduler(self._client, SubmitTrajectories(self._session, part))
                await self._channel.unless_failed(request)
            except (OSError, RuntimeError) as error:
                raise ClusterLost(f"the trajectories were not submitted: {error}") from None

    def admit(self, trajectory_id: str) -> None:
        event = self._admitted.get(trajectory_id)
        if event is not None:
            event.set()
            self._on_admitted()

    async def wait(self, trajectory_id: str) -> None:
        """Until the trajectory is admitted."""
        await self._admitted[trajectory_id].wait()

    def forget(self, trajectory_id: str) -> None:
        self._admitted.pop(trajectory_id, None)

    @property
    def waiting(self) -> int:
        return sum(not event.is_set() for event in self._admitted.values())
