"""A cluster that is lost while a run goes on: the run ends in bounded time, in one line, and can be resumed.

Real processes, real signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from distributed.core import Status
from worlds.live_agents import ToolAgent
from worlds.live_world import emulated, run, until
from worlds.shared_cluster import another_client, shared_cluster

from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.connection.control_channel import ClusterLost, answered_within
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Engines, Patience
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.wire.messages import ACTION_PREFIX, STEP_PREFIX
from heddle_dask.records.store import RunReader

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TASKS = 10
Fault = Callable[[LocalRolloutCluster], Awaitable[Any]]


def agent_rollout(client: Client, model: str, out: Output, patience: Patience | None = None) -> Rollout:
    engine = emulated(model, seconds_per_token=0.01, slots=2)
    engines = Engines(spec=engine, patience=patience or Patience())
    # Tools take long enough for one to be running whenever its worker ends.
    agent = ToolAgent(steps=4, tool_s=0.2)
    return Rollout(client, env=agent, model=model, engines=engines, out=out)


def test_a_silence_of_the_scheduler_is_told_before_the_limit_and_so_is_its_end() -> None:
    lines: list[str] = []

    async def answer(told: int) -> str:
        while len(lines) < told:
            await asyncio.sleep(0.01)
        return "answered"

    async def body() -> None:
        assert await answered_within(2.0, answer(0), lines.append) == "answered" and not lines
        assert await answered_within(2.0, answer(1), lines.append) == "answered"

    run(body())
    assert lines == ["the scheduler has not answered for 1 s", "the scheduler answers again"]


async def end_tools(made: LocalRolloutCluster) -> None:
    await made.workers["tool-0"].close()


async def end_engine(made: LocalRolloutCluster) -> None:
    await made.workers["rollout-0"].close()


async def restart(made: LocalRolloutCluster) -> None:
    async with Client(made, asynchronous=True, set_as_default=False) as other:
        await other.restart(wait_for_workers=False)


async def stop_scheduler(made: LocalRolloutCluster) -> None:
    os.kill(made.scheduler._process.program_pid, signal.SIGSTOP)


# In this order on one cluster: nothing comes after the last one.
FAULTS: Sequence[tuple[Fault, str]] = (
    (end_tools, "the last tool worker is gone, and none has come back for 1 s"),
    (end_engine, "the last engine is gone, and none has come back for 1 s"),
    (restart, "a client has restarted the cluster (Client.restart): all its tasks are gone"),
    (stop_scheduler, "the scheduler has not answered for 2 s"),
)


async def begin_again(made: LocalRolloutCluster) -> None:
    """Start the workers that were ended, and wait for those that start by themselves."""
    for name in ("tool-0", "rollout-0"):
        if made.workers[name].status == Status.closed:
            del made.workers[name]
    await made
    async with Client(made, asynchronous=True) as client:
        await client.wait_for_workers(2)


async def lose(made: LocalRolloutCluster, fault: Fault, reason: str, model: str, out: Path) -> int:
    """A run during which the cluster is lost in this way; how many of its trajectories are stored."""
    async with Client(made, asynchronous=True) as client:
        # A scheduler that is only busy may be silent for longer.
        patience = Patience(rejoin_s=1.0, **({"scheduler_s": 2.0} if fault is stop_scheduler else {}))
        rollout = agent_rollout(client, model, Output(out), patience)
        faults: list[asyncio.Future[Any]] = []
        with pytest.raises(ClusterLost) as lost:
            async with rollout:
                async for _ in rollout.stream(TASKS):
                    if not faults:
                        faults.append(asyncio.ensure_future(fault(made)))
        assert str(lost.value) == reason
        await asyncio.gather(*faults)
    stored = len(list(RunReader(out)))
    assert 1 <= stored < TASKS
    return stored


async def resume(client: Client, model: str, out: Path, stored: int) -> None:
    batch = await agent_rollout(client, model, Output(out, "resume")).run(TASKS)
    assert len(batch) == TASKS - stored


async def ask_again(made: LocalRolloutCluster, model: str, out: Path) -> None:
    """What another client cancels runs all the same."""

    def keys(dask_scheduler: Any) -> list[Any]:
        return [key for key in dask_scheduler.tasks if key[0] in ("llm", "tool")]

    async with Client(made, asynchronous=True) as client:
        rollout = agent_rollout(client, model, Output(out))
        async with Client(made, asynchronous=True, set_as_default=False) as other, rollout:
            running = asyncio.ensure_future(rollout.run(TASKS))
            cancelled: set[str] = set()
            while not running.done() and cancelled != {STEP_PREFIX, ACTION_PREFIX}:
                found = await other.run_on_scheduler(keys)
                for key in [key for key in found if key[0] not in cancelled][:3]:
                    await other.cancel([key], asynchronous=True, force=True)
                    cancelled.add(key[0])
            assert cancelled == {STEP_PREFIX, ACTION_PREFIX}
            batch = await running
            assert batch.counts == {"completed": TASKS}
            assert {len(record.steps) for record in batch} == {4}
            await until(lambda: rollout.progress()["acting"] == 0)


def test_a_run_outlives_what_is_cancelled_and_ends_with_its_cluster_and_is_resumed_on_another(
    model_dir: str, tmp_path: Path
) -> None:
    outs = [tmp_path / f"{number}.zarr" for number in range(len(FAULTS))]

    async def body() -> None:
        async with LocalRolloutCluster(1, tool_cpus=8, dashboard=False, asynchronous=True) as made:
            await ask_again(made, model_dir, tmp_path / "cancelled.zarr")
            stored = []
            for (fault, reason), out in zip(FAULTS, outs, strict=True):
                await begin_again(made)
                stored.append(await lose(made, fault, reason, model_dir, out))
        async with shared_cluster(engines=1) as client, contextlib.AsyncExitStack() as stack:
            clients = [client, *[await stack.enter_async_context(another_client(client)) for _ in outs[1:]]]
            resumed = zip(clients, outs, stored, strict=True)
            await asyncio.gather(*(resume(each, model_dir, out, number) for each, out, number in resumed))

    run(body(), 240)
    for out in outs:
        records = list(RunReader(out))
        assert len({record.trajectory_id for record in records}) == len(records) == TASKS
        assert {(r.status, r.detail, len(r.steps)) for r in records} == {("completed", "", 4)}
