"""A session on a cluster, from the claim to its last updates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.driver.connection.control_channel import ClusterLost, ControlChannel, answered_within
from heddle_dask.live.driver.connection.gateway_orders import GatewayOrders
from heddle_dask.live.driver.connection.submission import Submitter
from heddle_dask.live.driver.options import Patience
from heddle_dask.live.driver.session.degrees import EngineDegrees
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.driver_messages import (
    AwaitEnginesEnd,
    EndSession,
    GetCapacity,
    Notice,
    OwnEngines,
    ReadyEngine,
    StartSession,
)
from heddle_dask.live.wire.messages import STREAM_INTERVAL_S
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.live.worker.engine_host import Watch
from heddle_dask.live.worker.rollout_worker import RolloutWorker
from heddle_dask.live.worker.service_worker import PLUGIN_NAME as SERVICE_PLUGIN
from heddle_dask.live.worker.service_worker import ServiceWorker
from heddle_dask.live.worker.tool_worker import PLUGIN_NAME as TOOL_PLUGIN
from heddle_dask.live.worker.tool_worker import ToolWorker

if TYPE_CHECKING:
    from heddle_dask.live.scheduler.plugin import HeddleScheduler

_LOG = logging.getLogger(__name__)
# A cluster that has failed may not answer: the end of its session is not waited for longer.
_FAILED_END_S = 2.0
_POLL_S = 0.01


class OpenSession:
    """The driver's side of a session: `submitter` submits to it, `channel` polls it.

    Belongs to the client's event loop.
    """

    def __init__(
        self,
        client: Client,
        session_id: str,
        on_notice: Callable[[Notice], None],
        on_lines: Callable[[list[Any]], None],
        patience: Patience,
    ) -> None:
        self.session_id = session_id
        self.submitter = Submitter(client, session_id)
        self.gateways = GatewayOrders(client, session_id)
        self.channel = ControlChannel(client, session_id, on_notice, on_lines, patience)
        self._client = client
        self._patience = patience

    @classmethod
    async def claim(
        cls,
        client: Client,
        request: StartSession,
        *,
        on_notice: Callable[[Notice], None],
        on_lines: Callable[[list[Any]], None],
        patience: Patience,
    ) -> OpenSession:
        """Open a session on the cluster, before anything on it is changed but the scheduler's plugin.

        Parameters
        ----------
        request
            With the id of the client, and a new one for the session.
        on_notice, on_lines
            Take the notices of the controller, and the lines of its journal, as long as the session is open.

        Raises
        ------
        BadInput
            The strategy cannot be built, or the scheduler cannot load this package.
        ClusterLost
            The scheduler does not answer.
        """
        # A sixth of the time that `from heddle_dask import Rollout` took.
        from heddle_dask.live.scheduler.plugin import HeddleScheduler

        await answered_within(patience.scheduler_s, _register(client, HeddleScheduler()))
        dask.shorten_own_interval(client, STREAM_INTERVAL_S)
        await answered_within(patience.scheduler_s, ask_scheduler(client, request))
        claimed = cls(client, request.session, on_notice, on_lines, patience)
        claimed.channel.start()
        return claimed

    async def provide_workers(self, spec: EngineSpec, degrees: EngineDegrees | None, watch: Watch) -> None:
        """Register the plugins that workers lack; engines that run this model already are used as they are.

        Parameters
        ----------
        watch
            The time limits of engines that are started here, where no TP degrees were asked for.

        Raises
        ------
        BadInput
            Engines that run already return other logprobs.
        """
        capacity = await ask_scheduler(self._client, GetCapacity())
        if TOOL_PLUGIN not in capacity.plugins:
            await _register(self._client, ToolWorker())
        # Of sessions that begin together the one that the scheduler has opened first starts the engines.
        earlier = capacity.sessions[: capacity.sessions.index(self.session_id)]
        if earlier:
            check_shared(spec, capacity.engines, earlier[0], degrees is not None)
            return
        models = {(engine.kind, engine.model) for engine in capacity.engines}
        runs_already = models == {(spec.kind, spec.model)}
        if runs_already:
            check_logprobs(spec, capacity.engines)
        owns_engines = capacity.engines_inherited or not runs_already
        if owns_engines:
            await ask_scheduler(self._client, OwnEngines(self.session_id, self._patience.orphans_s))
        if degrees is not None:
            await degrees.open(self.session_id, owns_engines)
        elif not runs_already:
            await _register(self._client, RolloutWorker(spec, watch))
        if not runs_already or (degrees is not None and owns_engines):
            await self._until_gone(capacity.engines)

    async def _until_gone(self, replaced: Sequence[ReadyEngine]) -> None:
        """Wait for the reports of engines that have ended with their plugin, which may come after the answers."""
        old = {ready.engine.engine_id for ready in replaced}
        while old & {ready.engine.engine_id for ready in (await ask_scheduler(self._client, GetCapacity())).engines}:
            await asyncio.sleep(_POLL_S)

    async def check_engines(self, spec: EngineSpec) -> None:
        """Refuse engines that another session has started meanwhile, if they are not those that this one needs.

        Raises
        ------
        BadInput
            As `check_shared`.
        """
        capacity = await ask_scheduler(self._client, GetCapacity())
        others = [session for session in capacity.sessions if session != self.session_id]
        if others:
            check_shared(spec, capacity.engines, others[0], with_degrees=False)

    async def provide_service_hosts(self) -> None:
        """Register the plugin that hosts model services, where workers lack it.

        Raises
        ------
        BadInput
            A worker cannot load this package.
        """
        if SERVICE_PLUGIN not in (await ask_scheduler(self._client, GetCapacity())).plugins:
            await _register(self._client, ServiceWorker())

    async def close(self) -> None:
        """End the session and the engines that it started, once its last journal lines are here.

        Raises
        ------
        ClusterLost
            The scheduler does not answer, and the run does not know it yet.
        """
        await self.gateways.close()
        await self.submitter.close()
        self.channel.stop()
        failed = self.channel.failed.done()
        limit_s = _FAILED_END_S if failed else self._patience.scheduler_s
        try:
            ends_engines = self._client.status == "running" and await answered_within(limit_s, self._end())
        except (OSError, RuntimeError, ClusterLost) as error:
            if not failed:
                raise ClusterLost(f"the scheduler did not confirm the end of the session: {error}") from None
            ends_engines = False
        finally:
            await self.channel.close()
        if ends_engines:
            try:
                await answered_within(limit_s, ask_scheduler(self._client, AwaitEnginesEnd()))
            except (OSError, RuntimeError, ClusterLost) as error:  # the run itself is complete
                _LOG.warning("engines may still run: the workers did not confirm their end: %s", error)

    async def _end(self) -> bool:
        """End the session; whether its engines end too."""
        last = await ask_scheduler(self._client, EndSession(self.session_id))
        self.channel.take(last)
        return last.ends_engines


def check_shared(spec: EngineSpec, engines: Sequence[ReadyEngine], other: str, with_degrees: bool) -> None:
    """Refuse to use engines together with another session, if they are not those that this one needs.

    Raises
    ------
    BadInput
        TP degrees are asked for, or an engine serves another model.
    """
    if with_degrees:
        raise BadInput(
            f"session {other} uses the engines of this cluster, whose TP degrees cannot change now: leave tp_degrees "
            "out, or use another cluster"
        )
    for ready in engines:
        if (ready.kind, ready.model) != (spec.kind, spec.model):
            raise BadInput(
                f"session {other} uses the engines of this cluster, {ready.kind} with {ready.model}: roll out with "
                "that model, wait for its end, or use another cluster"
            )
    check_logprobs(spec, engines)


def check_logprobs(spec: EngineSpec, engines: Sequence[ReadyEngine]) -> None:
    """Refuse engines that return other logprobs than `spec` says: the run would record them as those."""
    asked = spec.options.logprobs
    others = [ready for ready in engines if ready.logprobs != asked]
    if others:
        raise BadInput(
            f"engine {others[0].engine.engine_id} runs already and returns {others[0].logprobs} logprobs, not {asked}: "
            f"ask for {others[0].logprobs} ones"
        )


async def _register(client: Client, plugin: HeddleScheduler | ToolWorker | RolloutWorker) -> None:
    """Register a plugin; a process that cannot load this package is told in one line."""
    try:
        await client.register_plugin(plugin)
    except ImportError as error:
        raise BadInput(
            f"the cluster's scheduler or a worker of it cannot load heddle_dask ({error}): "
            "install heddle-dask in this version there"
        ) from error
