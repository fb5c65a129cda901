"""The weights of one rollout worker's engine: fetched while it generates, installed on order, kept for its restarts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

from heddle_dask.core.commands import FetchWeights, InstallWeights
from heddle_dask.core.errors import HeddleError
from heddle_dask.core.events import WeightsFetched, WeightsInstalled
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.collective_fetch import CollectiveFetch, EngineWeights
from heddle_dask.engines.contract import WeightUpdateFailed
from heddle_dask.engines.file_lock import LockStopped
from heddle_dask.engines.node_weights import FetchStopped, NodeWeights, NodeWeightsDirectory
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.worker.background_tasks import BackgroundTasks
from heddle_dask.live.worker.context_mover import EngineOwner
from heddle_dask.weights.collective import is_collective

# A load may fail because the engine was killed or its files were damaged meanwhile: it is tried again once, with files
# that are compared with their digests again. Each attempt costs a restart of the engine.
_MOST_FAILED_LOADS = 2
FETCH_S = 1800.0
"""A fetch that takes longer has failed: a store that does not answer holds no engine back for ever."""


class WeightKeeper:
    """Carries out the scheduler's orders; every order is answered once, unless a newer one replaces it."""

    def __init__(
        self,
        owner: EngineOwner,
        directory: Path,  # the node's directory of fetched weights, shared with the other workers of the node
        report: Callable[[Report], None],
        background: BackgroundTasks,
    ) -> None:
        self._owner = owner
        self._directory = directory
        self._report = report
        self._background = background
        self._installed: NodeWeights | None = None
        self._model = ""  # the model that they replaced
        self._fetched: NodeWeights | EngineWeights | None = None
        self._wanted: FetchWeights | None = None
        # The version that an engine of this worker could not load, how often, and why.
        self._unloadable, self._failed_loads, self._load_failure = PolicyVersion(), 0, ""
        self._stop = threading.Event()
        self._one = asyncio.Lock()
        self._closed = False

    def installed_for(self, spec: EngineSpec) -> NodeWeights | None:
        """The weights that an engine of this spec begins with; None: those of its model directory."""
        if self._installed is not None and self._model != spec.model:
            self._installed.release()
            self._installed = None
        return self._installed

    def fetch(self, order: FetchWeights) -> None:
        """Begin to fetch; an older fetch ends without an answer."""
        if self._wanted == order:
            return  # it is under way
        self._stop.set()
        self._stop = threading.Event()
        self._wanted = order
        self._background.start(self._fetch(order, self._stop))

    def install(self, order: InstallWeights) -> None:
        self._background.start(self._install(order))

    def close(self) -> None:
        self._closed = True
        self._stop.set()
        for weights in (self._installed, self._fetched):
            if weights is not None:
                weights.release()
        self._installed = self._fetched = None

    async def clear(self) -> None:
        """Remove from the node's disk what no other worker uses."""
        await asyncio.to_thread(NodeWeightsDirectory(self._directory, self._owner.spec.model).clear)

    # ------------------------------------------------------------------ inside

    async def _fetch(self, order: FetchWeights, stop: threading.Event) -> None:
        began_s = time.monotonic()
        cause, fetched = "", None
        client = self._owner.client
        if client is None or order.engine_id != self._owner.engine_id:
            cause = "the engine is gone"
        elif (failed := self._failed_loads_of(order.version)) >= _MOST_FAILED_LOADS:
            cause = f"{self._load_failure}; tried {failed} times"
        else:
            try:
                bringing = self._brought(order, client, stop, recheck=failed > 0)
                fetched = await asyncio.wait_for(bringing, FETCH_S)
            except TimeoutError:
                cause = f"weights {order.version} did not come from {order.uri} within {FETCH_S:.0f} s"
            except (FetchStopped, LockStopped):
                return
            except HeddleError as error:
                cause = str(error)
        if stop.is_set() or self._closed:
            # A newer order replaces it.
            if fetched is not None:
                fetched.release()
            return
        self._wanted = None
        if cause:
            stop.set()  # one that has not ended: its thread ends as soon as it can
        if fetched is not None:
            if self._fetched is not None:
                self._fetched.release()
            self._fetched = fetched
        seconds = time.monotonic() - began_s
        fetched_now = WeightsFetched(UNSTAMPED, order.engine_id, order.version, cause, seconds)
        self._report(Report("", fetched_now))

    async def _brought(
        self, order: FetchWeights, client: EngineClient, stop: threading.Event, *, recheck: bool
    ) -> NodeWeights | EngineWeights:
        spec = self._owner.spec
        copies = NodeWeightsDirectory(self._directory, spec.model, spec.dtype)
        if is_collective(order.uri):
            fetching = CollectiveFetch(client, engine_kind(spec.kind).dialect, copies)
            return await fetching.fetch(order.uri, order.version, stop)
        return await asyncio.to_thread(copies.fetch, order.uri, order.version, client.version, stop, recheck=recheck)

    async def _install(self, order: InstallWeights) -> None:
        paused_s, cause = 0.0, ""
        async with self._one:
            try:
                paused_s = await self._installed_now(order)
            except HeddleError as error:
                cause = str(error)
                self._restart_if_needed(order, error)
        installed = WeightsInstalled(UNSTAMPED, order.engine_id, order.version, paused_s, cause)
        self._report(Report("", installed))

    async def _installed_now(self, order: InstallWeights) -> float:
        client, fetched = self._owner.client, self._fetched
        if client is None or order.engine_id != self._owner.engine_id:
            raise WeightUpdateFailed("the engine is gone", False)
        if fetched is None or fetched.version != order.version:
            raise WeightUpdateFailed(f"weights {order.version} are not at hand", False)
        if isinstance(fetched, EngineWeights) and fetched.client is not client:
            raise WeightUpdateFailed(f"the engine that received weights {order.version} is gone", False)
        if not fetched.version.is_newer_than(client.version):
            raise WeightUpdateFailed(f"weights {order.version} are not newer than {client.version}", False)
        self._fetched = None
        directory = str(fetched.path) if isinstance(fetched, NodeWeights) else None
        try:
            done = await client.install_weights(directory, order.version, keep_kv=order.keep_kv)
        except BaseException:
            fetched.release()
            raise
        self._keep(fetched)
        return done.paused_s

    def _keep(self, installed: NodeWeights | EngineWeights) -> None:
        """From its next start on the engine begins with these weights, where they are files."""
        files = installed if isinstance(installed, NodeWeights) else None
        before, self._installed, self._model = self._installed, files, self._owner.spec.model
        if before is not None:
            before.release()
        if self._closed:
            self.close()
        elif self._owner.host is not None:
            self._owner.host.installed = files
            if files is not None:
                copies = NodeWeightsDirectory(self._directory, self._owner.spec.model)
                self._background.start(asyncio.to_thread(copies.prune, files.version))

    def _restart_if_needed(self, order: InstallWeights, error: HeddleError) -> None:
        if not (isinstance(error, WeightUpdateFailed) and error.must_restart):
            return
        self._failed_loads = self._failed_loads_of(order.version) + 1
        self._unloadable, self._load_failure = order.version, str(error)
        if order.engine_id == self._owner.engine_id and self._owner.host:
            self._owner.host.end_incarnation(str(error))

    def _failed_loads_of(self, version: PolicyVersion) -> int:
        return self._failed_loads if version == self._unloadable else 0
