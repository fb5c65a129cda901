"""Several rollouts at the same time on one cluster: shares by weight, ends and crashes that disturb no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from worlds.live_agents import ToolAgent
from worlds.live_world import control_lines, descendants, emulated, run, until
from worlds.shared_cluster import another_client, shared_cluster

from heddle_dask.core.commands import DropContext, StartStep
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId, HostId
from heddle_dask.core.journal_codec import decode
from heddle_dask.core.run_record import plain_name
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.live.driver.connection.capacity import wait_for_capacity
from heddle_dask.live.driver.connection.control_channel import ControlPlaneFailed
from heddle_dask.live.driver.files.recorded_sessions import RecordedSession, own_lines, recorded_sessions
from heddle_dask.live.driver.files.recorded_sessions import control_lines as facts_and_lines
from heddle_dask.live.driver.options import Engines, Patience
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.wire.driver_messages import GetCapacity
from heddle_dask.live.wire.envelopes import Order
from heddle_dask.live.wire.messages import ENGINE_PLUGIN, ENGINE_RESOURCE
from heddle_dask.live.wire.transport import ask_scheduler, send
from heddle_dask.live.wire.worker_messages import EngineReadyReport, HostReadyReport
from heddle_dask.live.worker.rollout_worker import RolloutWorker
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import Strategy

pytestmark = pytest.mark.cluster

SLOTS = 8


def rollout(client: Client, model: str, weight: float, out: Path | None = None, **options: Any) -> Rollout:
    chosen: dict[str, Any] = {
        "env": ToolAgent(steps=5, tokens=24, tool_s=0.0),
        "engines": emulated(model, slots=SLOTS, seconds_per_token=0.004),
        "strategy": Strategy("sticky-least-loaded", weight=weight),
        **options,
    }
    return Rollout(client, model=model, out=out, **chosen)


def places_while_both_wait(path: Path) -> Counter[str]:
    """Places at the engine that each run was given while steps of both were held back; all steps are equally long.

    At first the second run gets more: the first one pays for the slots that it had when the other one came.
    """
    given: list[str] = []
    ((facts, _), *parts) = facts_and_lines(path)
    assert facts is not None
    session = RecordedSession(facts)
    for _, lines in parts:
        for line in lines:
            waited = [each.held for each in session.controller.state.runs.values()]
            session.take([line])
            if len(waited) == 2 and all(waited):
                sent = [decode(row) for row in line[1] if row[0] == "StartStep"]
                given += [plain_name(c.step_id.trajectory_id)[0] for c in sent if isinstance(c, StartStep)]
    assert session.mismatch is None
    return Counter(given[4 * SLOTS :])


def test_two_rollouts_that_begin_at_the_same_moment_have_one_set_of_engines(model_dir: str) -> None:
    async def body() -> None:
        async with shared_cluster(engines=1) as client, another_client(client) as other:
            both = [rollout(each, model_dir, 1.0) for each in (client, other)]
            batches = await asyncio.gather(*(each.run(6) for each in both))
            assert [batch.counts for batch in batches] == [{"completed": 6}] * 2

    run(body())


def test_two_rollouts_share_an_engine_by_their_weights_and_both_journals_replay(model_dir: str, tmp_path: Path) -> None:
    paths = tmp_path / "one.zarr", tmp_path / "three.zarr"

    async def body() -> None:
        async with shared_cluster(engines=1) as client, another_client(client) as other:
            one, three = (
                rollout(c, model_dir, w, p) for c, w, p in zip((client, other), (1.0, 3.0), paths, strict=True)
            )
            async with one:
                running = asyncio.ensure_future(one.run(40))
                await until(lambda: one.progress().get("generating", 0) > 0)
                batches = await asyncio.gather(three.run(72), running)
                assert [batch.counts for batch in batches] == [{"completed": 72}, {"completed": 40}]
                assert (await one.run(2)).counts == {"completed": 2}, "the engine is still there"
            await until(lambda: not descendants("heddle_dask.engines.emulated"))

    run(body())
    for path in paths:
        (session,) = recorded_sessions(path)
        assert session.mismatch is None and not session.missing and session.compared == session.events
        kinds = Counter(line[0][0] for line in control_lines(path))
        assert kinds["RunStarted"] == 2
    places = places_while_both_wait(paths[1])
    assert places["1"] > 20, places
    assert places["2"] / places["1"] == pytest.approx(3.0, rel=0.1), places
    names = {record.trajectory_id for record in RunReader(paths[1])}
    own = [line for _, lines in own_lines(facts_and_lines(paths[1])) for line in lines]
    submitted = {line[0][2][0] for line in own if line[0][0] == "TrajectorySubmitted"}
    assert submitted == names, "its own trajectories, by their own names"


def test_an_engine_that_is_announced_after_its_worker_has_left_gets_no_step(model_dir: str) -> None:
    """The stream of a worker that drains at its start may bring the news when Dask has removed it."""

    def announce_late(dask_scheduler: Any) -> None:
        registry = dask_scheduler.plugins["heddle"]._registry
        ((_, engine),) = registry.engines.values()
        (host,) = [host for _, host in registry.hosts.values()]
        reports = (
            EngineReadyReport(replace(engine, engine_id=EngineId("gone/1-1")), "emulated", model_dir),
            HostReadyReport(replace(host, host_id=HostId("gone/1"))),
        )
        for report in reports:
            mapping = report.to_wire()
            dask_scheduler.stream_handlers[mapping.pop("op")](worker="tcp://127.0.0.1:1", **mapping)

    async def body() -> None:
        async with shared_cluster(engines=1) as client, rollout(client, model_dir, 1.0) as steady:
            running = asyncio.ensure_future(steady.run(20))
            await until(lambda: steady.progress().get("queued", 0) > 0)
            await client.run_on_scheduler(announce_late)
            assert (await running).counts == {"completed": 20}

    run(body())


async def ends_late(dask_worker: Any) -> None:
    """The engine of a worker ends slowly, and the worker's report of that comes after its answer to the scheduler."""
    if ENGINE_RESOURCE in dask_worker.state.total_resources:
        plugin = dask_worker.plugins[ENGINE_PLUGIN]
        teardown = plugin.teardown

        async def slow(worker: Any) -> None:
            await asyncio.sleep(1.0)
            dask_worker.batched_stream.interval = 1.0
            dask_worker.batched_stream.send({"op": "keep-alive"})
            await teardown(worker)

        plugin.teardown = slow


def test_engines_that_have_ended_are_not_taken_for_running_ones_though_their_reports_are_late(
    model_dir: str, tmp_path: Path
) -> None:
    engines = Engines(spec=emulated(model_dir), patience=Patience(engines_s=15.0))
    other, out = tmp_path / "other", tmp_path / "run.zarr"
    other.symlink_to(model_dir)

    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            async with rollout(client, model_dir, 1.0, engines=engines) as first:
                await first.run(1)
                await client.run(ends_late)
                closing = asyncio.ensure_future(first.close())
                while (await ask_scheduler(client, GetCapacity())).sessions:
                    await asyncio.sleep(0.01)
            assert (await rollout(client, model_dir, 1.0, engines=engines).run(1)).counts == {"completed": 1}
            await closing
            # Engines that belong to no session: a rollout with another model replaces them.
            await client.register_plugin(RolloutWorker(replace(emulated(str(other)), max_model_len=512)))
            await wait_for_capacity(client, 1, Patience())
            await client.run(ends_late)
            await rollout(client, model_dir, 1.0, out=out).run(1)
            assert RunReader(out).metadata["context_tokens"] == 4096

    run(body())


# Dask leaves the socket of a connection that is cancelled in its handshake, as that of the dying client may be.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
def test_a_rollout_that_fails_or_dies_disturbs_no_other(model_dir: str, tmp_path: Path) -> None:
    def break_second(dask_scheduler: Any) -> None:
        plugin = dask_scheduler.plugins["heddle"]
        (_, second) = plugin.control.session_ids
        plugin._sessions[second]._dispatcher.carry_out = lambda command: 1 / 0

    def misdirect_second(dask_scheduler: Any) -> None:
        (_, second) = dask_scheduler.plugins["heddle"].control.session_ids
        unusable: Any = {"no": "name"}
        (address,) = [a for a, ws in dask_scheduler.workers.items() if ws.name == "rollout-0"]
        send(dask_scheduler, Order(second, DropContext(unusable, unusable)), address)

    def runs(dask_scheduler: Any) -> int:
        control = dask_scheduler.plugins["heddle"].control
        return 0 if control is None else len(control.controller.state.runs)

    async def body() -> None:
        async with shared_cluster(engines=1) as client, rollout(client, model_dir, 1.0) as steady:
            running = asyncio.ensure_future(steady.run(60))
            await until(lambda: steady.progress().get("generating", 0) > 0)
            async with another_client(client) as other:
                failing = rollout(other, model_dir, 1.0)
                fails = asyncio.ensure_future(failing.run(30))
                await until(lambda: failing.progress().get("generating", 0) > 0)
                await client.run_on_scheduler(break_second)
                with pytest.raises(ControlPlaneFailed, match="ZeroDivisionError"):
                    await fails
                failing = rollout(other, model_dir, 1.0)
                fails = asyncio.ensure_future(failing.run(30))
                await until(lambda: failing.progress().get("generating", 0) > 0)
                await client.run_on_scheduler(misdirect_second)
                with pytest.raises(ControlPlaneFailed, match=r"worker rollout-0: .*DropContext.*TypeError") as told:
                    await fails
                assert "\n" not in str(told.value)
                with pytest.raises(BadInput, match=r"session \w+ uses the engines of this cluster.* tp_degrees"):
                    await rollout(
                        other,
                        model_dir,
                        1.0,
                        engines=Engines("emulated", tp_degrees=[1], options=EmulatedOptions()),
                    ).run(1)
            dying = another_client(client)
            await dying
            lost = asyncio.ensure_future(rollout(dying, model_dir, 1.0).run(30))
            while await client.run_on_scheduler(runs) != 2:
                await asyncio.sleep(0.01)
            dying.scheduler_comm.comm.abort()
            batch = await running
            assert batch.counts == {"completed": 60}
            while await client.run_on_scheduler(runs) != 1:
                await asyncio.sleep(0.01)
            lost.cancel()
            await asyncio.gather(lost, dying.close(), return_exceptions=True)
            assert (await steady.run(2)).counts == {"completed": 2}

    run(body())
