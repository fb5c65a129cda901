"""What dies during a rollout, and what must not be lost with it. Real processes, real signals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client
from worlds.live_agents import ToolAgent, always_die, count_and_maybe_die, echo_tool, lose_both
from worlds.live_world import (
    control_lines,
    emulated,
    engine_process,
    engine_processes,
    idle_clusters,
    kill,
    lives,
    run,
    until,
    worker_process,
)
from worlds.shared_cluster import shared_cluster

from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.engines.health import HealthLimits
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.connection.control_channel import ControlPlaneFailed
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.session.open_session import OpenSession
from heddle_dask.live.driver.session.rollout_engines import RolloutEngines
from heddle_dask.live.wire.driver_messages import GetCapacity
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.records.store import RunReader
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.strategies.presets import DEFAULT_PRESET, build_strategies

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


async def collect(stream: AsyncIterator[TrajectoryRecord], after: int, fault: Callable[[], None]) -> Any:
    """All records of a stream; calls `fault` when `after` of them are there."""
    records = []
    async for record in stream:
        records.append(record)
        if len(records) == after:
            fault()
    return records


def check_complete(records: Sequence[TrajectoryRecord], count: int, steps: int) -> None:
    assert len(records) == count
    assert len({record.trajectory_id for record in records}) == count
    details = [record.detail for record in records if record.status != "completed"]
    assert details == []
    for record in records:
        assert len(record.steps) == steps
        (branch,) = record.branches
        sampled = sum(step.generated_tokens for step in record.steps)
        assert int(branch.loss_mask.sum()) == sampled == steps * 20


def test_a_run_whose_only_engine_dies_before_its_first_step_waits_for_it(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = RolloutEngines.start

    async def start_and_die(engines: RolloutEngines, session: OpenSession) -> None:
        await start(engines, session)
        kill(engine_process("rollout-0").pid)
        while (await ask_scheduler(engines._client, GetCapacity())).engines:
            await asyncio.sleep(0.01)

    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            monkeypatch.setattr(RolloutEngines, "start", start_and_die)
            batch = await Rollout(client, env=ToolAgent(), model=model_dir, engines=emulated(model_dir)).run(2)
            assert batch.counts == {"completed": 2}

    run(body())


def test_a_killed_engine_is_restarted_and_its_steps_go_on_elsewhere(model_dir: str) -> None:
    async def body() -> None:
        async with shared_cluster() as client:
            rollout = Rollout(
                client,
                env=ToolAgent(steps=5, tokens=20),
                model=model_dir,
                engines=emulated(model_dir, seconds_per_token=0.01),
                samples=4,
                # A step that is asked again before the loss of its engine is known comes back, and spends all of them.
                budget=Budget(retries=RetryPolicy(max_step_attempts=4)),
            )
            async with rollout:

                def fault() -> None:
                    kill(engine_process("rollout-1").pid)

                records = await collect(rollout.stream(6), 2, fault)
                check_complete(records, 24, 5)
                await until(lambda: rollout.progress()["engines_ready"] == 2)
                second = await collect(rollout.stream(4), 0, lambda: None)
                names = {s.engine_id for r in (*records, *second) for s in r.steps if "rollout-1" in s.engine_id}
                assert len(names) == 2, "a restarted engine has a new id"

    run(body())


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hang_after_requests", "it missed 2 health checks"),
        ("stuck_after_requests", "it made no progress for"),
    ],
)
def test_a_hanging_engine_is_killed_and_replaced(model_dir: str, fault: str, reason: str) -> None:
    from heddle_dask.live.driver.session import open_session
    from heddle_dask.live.worker.engine_host import Watch
    from heddle_dask.live.worker.rollout_worker import RolloutWorker

    lines: list[str] = []

    async def body() -> Any:
        async with shared_cluster() as client:
            rollout = Rollout(
                client,
                env=ToolAgent(steps=3),
                model=model_dir,
                engines=emulated(model_dir, faults={fault: 12}),
                samples=2,
                progress=lines.append,
            )
            return await rollout.run(6)

    with pytest.MonkeyPatch.context() as patch:
        stall_s = 1.0 if fault.startswith("stuck") else 60.0  # what hangs makes no progress either
        check_s = 1.0 if fault.startswith("hang") else 5.0
        watch = Watch(health=HealthLimits(0.2, 2, check_s=check_s), stall_s=stall_s, canary_s=1.0)
        patch.setattr(open_session, "RolloutWorker", lambda spec, _: RolloutWorker(spec, watch))
        batch = run(body())
    check_complete(batch.trajectories, 12, 3)
    lost = [line for line in lines if " is lost: " in line]
    assert any(reason in line and "(log: " in line for line in lost), lost
    assert not any("\n" in line for line in lost)


def test_interrupt_keeps_what_is_finished_and_aborts_the_rest(model_dir: str, tmp_path: Path) -> None:
    async def body() -> Any:
        async with shared_cluster(engines=1) as client:
            rollout = Rollout(
                client,
                env=ToolAgent(steps=4),
                model=model_dir,
                engines=emulated(model_dir, seconds_per_token=0.01, slots=2),
                samples=2,
                out=tmp_path / "run.zarr",
            )
            async with rollout:
                return await collect(rollout.stream(10), 3, rollout.interrupt)

    records = run(body())
    statuses = [record.status for record in records]
    assert len(records) == 20
    assert statuses.count("completed") >= 3
    assert statuses.count("aborted") == 20 - statuses.count("completed") > 0
    assert {r.cause for r in records if r.status == "aborted"} == {"user"}


def test_an_abort_to_a_dead_engine_does_not_take_its_worker_along(model_dir: str) -> None:
    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            engine = emulated(model_dir, seconds_per_token=0.02, slots=8)
            async with Rollout(client, env=ToolAgent(steps=4), model=model_dir, engines=engine) as rollout:

                def fault() -> None:
                    kill(engine_process("rollout-0").pid)
                    rollout.interrupt()

                before = worker_process("rollout-0").pid
                first = await collect(rollout.stream(12), 1, fault)
                assert {record.status for record in first} == {"completed", "aborted"}
                assert worker_process("rollout-0").pid == before
                check_complete(await collect(rollout.stream(3), 0, lambda: None), 3, 4)

    run(body())


def test_an_interrupt_before_the_first_step_still_yields_every_record(model_dir: str) -> None:
    async def body() -> Any:
        async with (
            shared_cluster(engines=1) as client,
            Rollout(client, env=ToolAgent(), model=model_dir, engines=emulated(model_dir)) as rollout,
        ):
            await rollout.run(1)
            stream = rollout.stream(5)
            first = asyncio.ensure_future(anext(stream))
            while rollout._driver is None or rollout._driver.finished:
                await asyncio.sleep(0)
            rollout.interrupt()
            return [await first, *[record async for record in stream]]

    records = run(body())
    assert [record.status for record in records] == ["aborted"] * 5


# -- workers and the scheduler: on a cluster of this file's own, whose nannies start again what is killed ------------


@pytest.fixture(scope="module")
def place() -> Iterator[LocalRolloutCluster]:
    # Dask looks this long after the death of a worker whether it is back.
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10ms"}),
        LocalRolloutCluster(2, tool_workers=2, tool_cpus=8, dashboard=False) as made,
    ):
        yield made


@contextlib.asynccontextmanager
async def own_client(place: LocalRolloutCluster, workers: int = 4) -> AsyncIterator[Client]:
    """A client of it, once all of its workers are there; its processes are seen meanwhile, and by no other test."""
    idle_clusters.discard(str(place.directory))
    try:
        async with Client(place.scheduler_address, security=place.security, asynchronous=True) as client:
            await client.wait_for_workers(workers)
            yield client
    finally:
        idle_clusters.add(str(place.directory))


def test_a_killed_rollout_worker_takes_its_engine_and_loses_nothing(
    place: LocalRolloutCluster, model_dir: str, tmp_path: Path
) -> None:
    async def body() -> None:
        async with own_client(place) as client:
            rollout = Rollout(
                client,
                env=ToolAgent(steps=5, tokens=20),
                model=model_dir,
                engines=emulated(model_dir, seconds_per_token=0.005),
                samples=4,
                out=tmp_path / "run.zarr",
            )
            async with rollout:
                engines: list[psutil.Process] = []

                def fault() -> None:
                    engines.extend(engine_processes("rollout-0"))
                    kill(worker_process("rollout-0").pid)

                records = await collect(rollout.stream(6), 2, fault)
                check_complete(records, 24, 5)
                assert engines, "the killed worker hosted an engine"
                await until(lambda: not any(map(lives, engines)))
                # The nanny restarts the worker, and the worker its engine, which takes steps again.
                await until(lambda: rollout.progress()["engines_ready"] == 2)
                second = await collect(rollout.stream(6), 0, lambda: None)
                check_complete(second, 24, 5)
                used = {step.engine_id for record in second for step in record.steps}
                assert len(used) == 2

    run(body())
    lines = control_lines(tmp_path / "run.zarr")
    assert any(line[0][0] == "EngineLost" and line[0][-1] is True for line in lines)
    assert list(replay(Controller(build_strategies(DEFAULT_PRESET)), lines)) == []


class DeadlyTool(ToolAgent):
    """Calls a tool that kills its worker at the first call."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker

    async def solve(self, task: Task, ctx: Context) -> float | None:
        ctx.append("user", task.prompt)
        await ctx.generate(max_tokens=5, ignore_eos=True)
        if task.task_id == "t0":
            return float(await ctx.call(count_and_maybe_die, self.marker))
        for _ in range(10):
            await ctx.call(echo_tool, "x", 0.1)
        return 0.0


def test_actions_of_a_killed_tool_worker_run_again(place: LocalRolloutCluster, model_dir: str, tmp_path: Path) -> None:
    marker = str(tmp_path / "calls")

    async def body() -> Any:
        async with own_client(place) as client:
            rollout = Rollout(client, env=DeadlyTool(marker), model=model_dir, engines=emulated(model_dir))
            return await rollout.run(4)

    batch = run(body())
    assert batch.counts == {"completed": 4}
    rewards = {record.task_id: record.reward for record in batch}
    assert rewards == {"t0": 2.0, "t1": 0.0, "t2": 0.0, "t3": 0.0}


class PoisonedTool(ToolAgent):
    """One task's tool kills every worker that runs it."""

    async def solve(self, task: Task, ctx: Context) -> float | None:
        if task.task_id == "t0":
            await ctx.call(always_die)
        return 1.0


def test_an_action_that_kills_every_worker_is_given_up(place: LocalRolloutCluster, model_dir: str) -> None:
    async def body() -> Any:
        async with own_client(place) as client:
            rollout = Rollout(
                client,
                env=PoisonedTool(),
                model=model_dir,
                engines=emulated(model_dir),
                budget=Budget(retries=RetryPolicy(max_losses=1)),
            )
            return await rollout.run(2)

    batch = run(body())
    by_task = {record.task_id: record for record in batch}
    assert by_task["t1"].status == "completed"
    assert (by_task["t0"].status, by_task["t0"].cause) == ("failed", "action")
    assert "its worker died 2 times while it ran" in by_task["t0"].detail


# The two workers are closed, and do not come back.
def test_calls_of_a_tool_worker_that_is_lost_with_another_worker_run_again(
    place: LocalRolloutCluster, model_dir: str
) -> None:
    async def body() -> Any:
        async with own_client(place) as client:
            agent = ToolAgent(steps=2, tool_s=1.0)
            rollout = Rollout(client, env=agent, model=model_dir, engines=emulated(model_dir))
            running = asyncio.ensure_future(rollout.run(4))
            while not await client.run_on_scheduler(lose_both):
                await asyncio.sleep(0.01)
            return await running

    assert run(body()).counts == {"completed": 4}


# The last of the file: it ends the cluster.
def test_a_killed_scheduler_ends_the_run_and_keeps_what_is_finished(
    place: LocalRolloutCluster, model_dir: str, tmp_path: Path
) -> None:
    async def body() -> None:
        async with own_client(place, workers=2) as client:
            rollout = Rollout(
                client,
                env=ToolAgent(steps=4),
                model=model_dir,
                engines=emulated(model_dir, seconds_per_token=0.01, slots=2),
                samples=2,
                out=tmp_path / "run.zarr",
            )

            def fault() -> None:
                kill(place.scheduler._process.program_pid)

            with pytest.raises(ControlPlaneFailed, match="the scheduler does not answer"):
                await collect(rollout.stream(10), 3, fault)

    run(body())
    stored = list(RunReader(tmp_path / "run.zarr"))
    assert len(stored) >= 3
    assert {record.status for record in stored} == {"completed"}
