"""Tells the scheduler what the trainer has done, and waits until the engines have followed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from distributed import Client

from heddle_dask.core.errors import HeddleError
from heddle_dask.core.events import GroupEnded, OptimizerStepEnded, SwitchRequested, WeightsPublished
from heddle_dask.core.ids import FIRST_RUN, GroupId, PolicyVersion
from heddle_dask.core.transitions import WeightsState
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report, Reported
from heddle_dask.live.wire.training_messages import (
    EngineWeightState,
    GetWeightStatus,
    TrainingFiguresReport,
    WeightStatus,
)
from heddle_dask.live.wire.transport import ask_scheduler, send

POLL_S: Final = 0.05
LIMIT_S: Final = 1800.0
"""So long no engine more may take weights; a switch then goes on without those that have not."""
_RESUMED: Final = GroupId("resumed")  # stands for the groups of earlier processes


class NoEngineUpdated(HeddleError):
    """No engine could take the new weights: training on would only make samples that are too old."""


class WeightControl:
    def __init__(
        self,
        client: Client,
        session: str,  # id of the session that rolls out for this training
        note: Callable[[str], None],  # takes a line when an engine refuses weights
        limit_s: float = LIMIT_S,
    ) -> None:
        self._client = client
        self._session = session
        self._note = note
        self._noted: set[tuple[str, str]] = set()
        self._limit_s = limit_s
        self._left_out: set[str] = set()  # engines that are not waited for until they have newer weights

    def begins(self, version: PolicyVersion, accepted: int) -> None:
        """The training begins, or goes on, with this version; to be called once, before `stepped`.

        Parameters
        ----------
        accepted
            Trajectories that wait for a later optimiser step: they have the credits of those that would start.
        """
        self.stepped(version)
        if accepted:
            self._report(GroupEnded(UNSTAMPED, FIRST_RUN, _RESUMED, accepted))

    def stepped(self, version: PolicyVersion) -> None:
        """An optimiser step has ended."""
        self._report(OptimizerStepEnded(UNSTAMPED, FIRST_RUN, version))

    def published(self, version: PolicyVersion, uri: str, nbytes: int) -> None:
        """Engines may fetch these weights from now on."""
        self._report(WeightsPublished(UNSTAMPED, version, uri, nbytes))

    def show(self, step: int, figures: Mapping[str, float]) -> None:
        send(self._client, TrainingFiguresReport(self._session, step, figures))

    async def switch(self, version: PolicyVersion) -> None:
        """Let the engines go over to these weights, and return when all of them have, or newer ones.

        Engines that are lost meanwhile are not waited for, and neither are those that gave up, or that do not finish
        while no other does: the scheduler begins nothing on them that would be too old. Those that join load the newest
        weights by themselves.

        Raises
        ------
        NoEngineUpdated
            All engines gave up, or none has taken the weights within the limit.
        """
        self._report(SwitchRequested(UNSTAMPED, version))
        lacking, since_s = set[str](), time.monotonic()
        while not self._have(status := await self.status(), version):
            before, lacking = lacking, self._awaited(status, version)
            if lacking != before:
                since_s = time.monotonic()
            elif time.monotonic() - since_s >= self._limit_s:
                self._leave_out(lacking, status, version)
                since_s = time.monotonic()
            await asyncio.sleep(POLL_S)

    def _awaited(self, status: WeightStatus, version: PolicyVersion) -> set[str]:
        behind: set[str] = {engine.engine_id for engine in status.engines if not _has(engine.installed, version)}
        failed: set[str] = {engine.engine_id for engine in status.engines if engine.state == WeightsState.FAILED.value}
        return behind - failed - self._left_out

    def _leave_out(self, lacking: set[str], status: WeightStatus, version: PolicyVersion) -> None:
        limit = f"for {self._limit_s:.0f} s"
        if not status.engines:
            self._note(f"no engine is there {limit} to take weights {version}: waiting for one")
            return
        if not any(_has(engine.installed, version) for engine in status.engines):
            raise NoEngineUpdated(f"no engine has taken weights {version} {limit}: look at the logs of the engines")
        self._left_out |= lacking
        for engine in status.engines:
            if engine.engine_id in lacking:
                self._note(
                    f"engine {engine.engine_id} has not taken weights {version} {limit} (it is {engine.state}): the "
                    "training goes on without it"
                )

    async def status(self) -> WeightStatus:
        """Versions of the engines, and credits."""
        return await ask_scheduler(self._client, GetWeightStatus(self._session))

    async def in_use(self, lineage: str) -> set[PolicyVersion]:
        """Versions that engines have or are fetching: they stay in the store."""
        status = await self.status()
        versions = {engine.installed for engine in status.engines}
        versions |= {engine.fetched for engine in status.engines if engine.fetched is not None}
        return {version for version in versions if version.lineage == lineage}

    def _report(self, event: Reported) -> None:
        send(self._client, Report(self._session, event))

    def _have(self, status: WeightStatus, version: PolicyVersion) -> bool:
        for engine in status.engines:
            self._tell(engine)
        self._left_out -= {engine.engine_id for engine in status.engines if _has(engine.installed, version)}
        behind = [engine for engine in status.engines if not _has(engine.installed, version)]
        failed = [engine for engine in behind if engine.state == WeightsState.FAILED.value]
        if failed and len(failed) == len(status.engines):
            raise NoEngineUpdated(f"no engine could take weights {version}: {failed[0].cause}")
        return len(behind) < len(status.engines) and not self._awaited(status, version)

    def _tell(self, engine: EngineWeightState) -> None:
        told = (engine.engine_id, engine.cause)
        if engine.cause and told not in self._noted:
            self._noted.add(told)
            self._note(f"engine {engine.engine_id} keeps weights {engine.installed}: {engine.cause}")


def _has(installed: PolicyVersion, version: PolicyVersion) -> bool:
    return installed.lineage == version.lineage and installed.number >= version.number
