"""What others on the machine and on the cluster can do to a rollout: connect, submit tasks, send large values."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from distributed import Client, get_worker
from worlds.live_agents import ToolAgent
from worlds.live_world import cluster, emulated, run, until

from heddle_dask.environments.base import ActionFailed, Context, Task
from heddle_dask.live.driver.connection.long_payloads import LONG_PAYLOAD_BYTES
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.wire.driver_messages import SubmitTasks

pytestmark = [pytest.mark.cluster]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

LIMIT_BYTES = 4 * LONG_PAYLOAD_BYTES
FOREIGN_TASKS = 200


def foreign_task() -> Any:
    """A function that Dask sends by value: it computes, and says on which worker and thread."""

    def computes(number: int) -> tuple[str, int]:
        until_s = time.perf_counter() + 0.005
        while time.perf_counter() < until_s:
            pass
        return str(get_worker().name), threading.get_ident()

    return computes


async def size_on_loop(value: bytes) -> int:
    return len(value)


async def sends_large_values(task: Task, ctx: Context) -> float:
    """Arguments and values: long ones arrive, those over the limit fail their call and no other."""
    long = os.urandom(2 * LONG_PAYLOAD_BYTES)
    sizes = [await ctx.call(function, long) for function in (len, size_on_loop)]
    assert sizes == [len(long)] * 2
    assert await ctx.call(bytes, 2 * LONG_PAYLOAD_BYTES) == bytes(2 * LONG_PAYLOAD_BYTES)
    for what, args in (("arguments", (len, bytes(LIMIT_BYTES))), ("value", (bytes, LIMIT_BYTES))):
        with pytest.raises(ActionFailed, match=rf"its {what} of 4,194,\d\d\d bytes, pickled, is over the limit"):
            await ctx.call(*args)
    return 1.0


def watches() -> tuple[Any, Any]:
    """Two functions for the scheduler: the first has it note the largest task that comes, the second tells it."""

    def watch(dask_scheduler: Any) -> None:
        dask_scheduler.heddle_test_largest = 0
        handle = dask_scheduler.stream_handlers[SubmitTasks.op]

        def submit(**message: Any) -> None:
            sizes = [len(task["run"]) for task in message["tasks"]]
            dask_scheduler.heddle_test_largest = max(dask_scheduler.heddle_test_largest, *sizes)
            handle(**message)

        dask_scheduler.stream_handlers[SubmitTasks.op] = submit

    def largest(dask_scheduler: Any) -> int:
        return int(dask_scheduler.heddle_test_largest)

    return watch, largest


def listens_on() -> set[str]:
    """Addresses at which the processes of this test listen."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        found |= {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return found


def test_a_local_cluster_is_closed_to_others_and_foreign_tasks_stay_off_its_engines(
    model_dir: str, tmp_path: Path
) -> None:
    async def body() -> None:
        async with cluster(1, directory=tmp_path / "cluster") as (made, client):
            assert made.scheduler_address.startswith("tls://127.0.0.1:")
            workers = (await client.scheduler.identity(n_workers=-1))["workers"]
            assert all(address.startswith("tls://127.0.0.1:") for address in workers)
            assert listens_on() == {"127.0.0.1"}
            with pytest.raises(OSError):
                await Client(made.scheduler_address.replace("tls", "tcp"), asynchronous=True, timeout=1.0)
            (place,) = (tmp_path / "cluster").glob("tls-*")
            assert stat.S_IMODE(place.stat().st_mode) == 0o700
            assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o600}

            def rollout(env: Any) -> Rollout:
                return Rollout(
                    client,
                    env=env,
                    model=model_dir,
                    engines=emulated(model_dir),
                    budget=Budget(max_action_bytes=LIMIT_BYTES),
                )

            async with rollout(ToolAgent(steps=4)) as agents, Client(made, asynchronous=True) as other:
                running = asyncio.ensure_future(agents.run(8))
                # The rollout's plugin bounds the threads of the tool worker.
                await until(lambda: agents.progress().get("tokens", 0) > 0)
                ran = await other.gather(other.map(foreign_task(), range(FOREIGN_TASKS), pure=False))
                assert (await running).counts == {"completed": 8}
            assert {name for name, _ in ran} == {"tool-0"}
            assert len({thread for _, thread in ran}) <= (os.cpu_count() or 1)

            async with rollout(sends_large_values) as agents:
                watch, largest = watches()
                await client.run_on_scheduler(watch)
                (record,) = await agents.run(["large"])
                assert record.status == "completed", record.detail
                assert [action.status for action in record.actions] == ["ok"] * 3 + ["raised"] * 2
                assert 0 < await client.run_on_scheduler(largest) < LONG_PAYLOAD_BYTES
        assert not list((tmp_path / "cluster").glob("tls-*")), "the key goes with the cluster"

    run(body())


def test_a_cluster_without_encryption_is_asked_for() -> None:
    async def body() -> None:
        async with cluster(0, security=False) as (made, _):
            assert made.scheduler_address.startswith("tcp://127.0.0.1:")

    run(body())
