"""Ordinary clusters of a test process, started once and lent to test after test: engine slots and a tool worker.

Every test has a session of its own. A test that leaves something on its cluster fails, and the next one gets a new
cluster, as after any other failure. At most two are there at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from distributed import Client
from worlds.live_world import ENGINE, descendants, idle_clusters, without_nannies

from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.sandbox.stateful.local_sandbox import keeper_of_loop

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# For hangs only: an engine that ends takes a second or two.
LEFT_S = 60.0


class Lent:
    """A cluster, its processes when it was new, and the directory where its workers keep sandboxes and sockets."""

    def __init__(self, engines: int, **options: Any) -> None:
        # Engines have sockets there: the path must be short. Users of sandboxes pass through it.
        self.directory = Path(tempfile.mkdtemp(prefix="heddle-test-"))
        self.directory.chmod(0o711)
        # Workers import engine kinds of the tests by name.
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with without_nannies(), pytest.MonkeyPatch.context() as patched:
            patched.setenv("TMPDIR", str(self.directory))
            patched.setenv("PYTHONPATH", os.pathsep.join(paths))
            self.cluster = LocalRolloutCluster(engines, tool_cpus=8, dashboard=False, **options)
        self.workers: dict[str, int] = {}

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While a test has it, its processes can be seen."""
        idle_clusters.discard(str(self.cluster.directory))
        yield
        idle_clusters.add(str(self.cluster.directory))

    def close(self) -> None:
        idle_clusters.discard(str(self.cluster.directory))
        self.cluster.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def why_it_ended(self) -> str:
        """The end of the scheduler's log, if its process has ended while no test had the cluster; else empty."""
        if not self.cluster._scheduler_is_silent:
            return ""
        logs = [path.read_text(errors="replace") for path in self.directory.rglob("scheduler.log")]
        return f"{self.cluster.scheduler_address}: {' '.join(logs)[-2000:] or 'no log'}"

    def client(self, asynchronous: bool) -> Client:
        """Its cluster runs on a loop of its own: a client of a test's loop gets the address only."""
        return Client(self.cluster.scheduler_address, security=self.cluster.security, asynchronous=asynchronous)

    async def check(self, client: Client) -> None:
        """Wait until nothing of the test is left: sessions, tasks, sandboxes, engines; the workers are the same."""
        deadline = time.monotonic() + LEFT_S
        while left := await self._left(client):
            if time.monotonic() > deadline:
                raise AssertionError(f"left on the shared cluster: {left}")
            await asyncio.sleep(0.02)
        workers = await client.run(_name_and_process)
        now = dict(workers.values())
        self.workers = self.workers or now
        assert now == self.workers, "a worker of the shared cluster has died: the test needs one of its own"

    async def _left(self, client: Client) -> dict[str, Any]:
        left: dict[str, Any] = await client.run_on_scheduler(_sessions_and_tasks)
        boxes = await client.run(_sandboxes)
        left["sandboxes"] = [name for names in boxes.values() for name in names]
        left["engines"] = [each.pid for word in (ENGINE, "vllm.entrypoints") for each in descendants(word)]
        return {what: names for what, names in left.items() if names}


def _sessions_and_tasks(dask_scheduler: Any) -> dict[str, Any]:
    plugin = dask_scheduler.plugins.get("heddle")
    control = None if plugin is None else plugin.control
    return {
        "sessions": [] if control is None else control.session_ids,
        "tasks": [str(key) for key in dask_scheduler.tasks],
    }


async def _sandboxes(dask_worker: Any) -> list[str]:
    return list(keeper_of_loop().names) if str(dask_worker.name).startswith("tool") else []


def _name_and_process(dask_worker: Any) -> tuple[str, int]:
    return str(dask_worker.name), os.getpid()


MOST = 2
_lent: dict[str, Lent] = {}


def _lend(engines: int, options: dict[str, Any]) -> Lent:
    key = repr((engines, options))
    if key in _lent and (told := _lent[key].why_it_ended()):
        print(f"an idle shared cluster has ended: {told}", file=sys.__stderr__)
        _lent.pop(key).close()
    if key in _lent:
        _lent[key] = _lent.pop(key)  # the latest is the last
    else:
        while len(_lent) >= MOST:
            _lent.pop(next(iter(_lent))).close()
        _lent[key] = Lent(engines, **options)
    return _lent[key]


def _close_latest() -> None:
    """A test has spoiled it."""
    if _lent:
        _lent.popitem()[1].close()


def close_shared_clusters() -> None:
    """At the end of the process's tests."""
    while _lent:
        _close_latest()


@contextlib.asynccontextmanager
async def shared_cluster(engines: int = 2, **options: Any) -> AsyncIterator[Client]:
    """A client of the cluster with so many engine slots; afterwards nothing may be left on it."""
    lent = await asyncio.to_thread(_lend, engines, options)
    try:
        with lent.in_use():
            async with lent.client(asynchronous=True) as client:
                yield client
                await lent.check(client)
    except BaseException:
        await asyncio.to_thread(_close_latest)
        raise


@contextlib.contextmanager
def shared_cluster_sync(engines: int = 2, **options: Any) -> Iterator[Client]:
    """The same for a test without a loop."""
    lent = _lend(engines, options)
    try:
        with lent.in_use(), lent.client(asynchronous=False) as client:
            yield client
            client.sync(lent.check, client)
    except BaseException:
        _close_latest()
        raise


def another_client(client: Client) -> Client:
    """A second user of the same cluster."""
    assert client.scheduler is not None
    return Client(client.scheduler.address, security=client.security, asynchronous=True)
