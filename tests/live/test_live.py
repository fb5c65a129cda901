"""Rollouts on a real cluster with emulated engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from worlds.live_agents import FaultyAgent, RecordingWorker, ToolAgent
from worlds.live_world import check_against_engine, cluster, control_lines, emulated, run
from worlds.shared_cluster import shared_cluster, shared_cluster_sync

from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.journal_codec import replay
from heddle_dask.live.driver.connection.control_channel import ControlPlaneFailed
from heddle_dask.live.driver.inputs.rollout_inputs import Output
from heddle_dask.live.driver.options import Budget, Engines, Patience
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.session import open_session
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import DEFAULT_PRESET, Strategy, strategies_of_run

pytestmark = pytest.mark.cluster


# One that moves contexts, one that looks into caches, the default, and one that preempts; `heddle` and `heddle-paper`
# are in test_live_heddle.py. All presets are simulated and replayed in tests/sim/test_sim_world.py.
@pytest.mark.parametrize("strategy", ["least-load", "cache-aware", DEFAULT_PRESET, "autellix"])
def test_a_rollout_completes_and_its_journal_replays_to_the_same_commands(
    strategy: str, model_dir: str, tmp_path: Path
) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        async with shared_cluster() as client:
            rollout = Rollout(
                client,
                env=ToolAgent(),
                model=model_dir,
                engines=emulated(model_dir),
                strategy=strategy,
                samples=2,
                seed=5,
                out=out,
            )
            batch = await rollout.run(6)
        assert batch.counts == {"completed": 12}
        assert batch.reward_mean == 1.0

    run(body())
    reader = RunReader(out)
    assert len(reader) == 12
    engines = {step.engine_id.split("/")[0] for record in reader for step in record.steps}
    assert engines == {"rollout-0", "rollout-1"}
    lines = control_lines(out)
    # A step that was stopped for another reports each part.
    ends = [line[0] for line in lines if line[0][0] == "StepFinished"]
    assert len({tuple(event[2]) for event in ends}) == 36
    assert sum(line[0][0] == "ActionFinished" for line in lines) == 36
    assert sum(line[0][0] == "TrajectoryEnded" for line in lines) == 12
    assert list(replay(Controller(strategies_of_run(reader.metadata)), lines)) == []


@pytest.mark.parametrize("placement", ["round-robin", "sticky-least-loaded"])
def test_the_record_is_what_the_engine_saw_and_sampled(
    placement: str, model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen_path = tmp_path / "seen.jsonl"
    monkeypatch.setattr(open_session, "RolloutWorker", lambda spec, watch: RecordingWorker(spec, str(seen_path)))

    async def body() -> Any:
        async with shared_cluster() as client:
            rollout = Rollout(
                client,
                env=ToolAgent(steps=4),
                model=model_dir,
                engines=emulated(model_dir),
                strategy=Strategy("sticky", [f"placement={placement}"]),
                samples=2,
                out=tmp_path / "run.zarr",
            )
            return await rollout.run(4)

    run(body())
    records = list(RunReader(tmp_path / "run.zarr"))
    assert len(records) == 8
    check_against_engine(records, seen_path)
    if placement == "round-robin":
        moved = [r for r in records if len({s.engine_id for s in r.steps}) > 1]
        assert moved, "round robin moves contexts between workers"


def test_a_broken_agent_or_tool_fails_its_own_trajectory_only(model_dir: str, tmp_path: Path) -> None:
    async def body() -> Any:
        async with shared_cluster(engines=1) as client:
            rollout = Rollout(
                client,
                env=FaultyAgent(),
                model=model_dir,
                engines=emulated(model_dir),
                out=tmp_path / "run.zarr",
            )
            return await rollout.run(12)

    run(body())
    records = {r.task_id: r for r in RunReader(tmp_path / "run.zarr")}
    assert len(records) == 12
    for name, record in records.items():
        number = int(name.removeprefix("t"))
        if number % 3 == 0:
            assert (record.status, record.cause, record.reward) == ("failed", "agent", None)
            assert f"ZeroDivisionError: agent of task {number} is broken" in record.detail
            assert "live_agents.py" in record.detail
        elif number == 7:
            assert (record.status, record.cause, record.reward) == ("failed", "agent", None)
            assert record.detail.startswith("SystemExit: 3\n")
        elif number % 5 == 0:
            assert (record.status, record.cause, record.reward) == ("failed", "action", None)
            assert "invalid literal for int()" in record.detail
        else:
            assert (record.status, record.reward) == ("completed", None if number % 2 else 0.5)


def test_a_program_past_its_budget_is_truncated(model_dir: str) -> None:
    async def body() -> Any:
        async with shared_cluster(engines=1) as client:
            rollout = Rollout(
                client,
                env=ToolAgent(steps=10),
                model=model_dir,
                engines=emulated(model_dir),
                budget=Budget(max_steps=4),
            )
            return await rollout.run(3)

    batch = run(body())
    assert batch.counts == {"truncated": 3}
    assert {len(record.steps) for record in batch} == {4}
    assert {record.cause for record in batch} == {"context"}


def test_two_runs_of_one_session_and_an_appended_one_keep_ids_apart(model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            common: dict[str, Any] = {
                "env": ToolAgent(steps=1),
                "model": model_dir,
                "engines": emulated(model_dir),
            }
            async with Rollout(client, **common, out=out) as rollout:
                await rollout.run(2)
                await rollout.run(2)
            with pytest.raises(BadInput, match="exists"):
                await Rollout(client, **common, out=out).run(1)
            await Rollout(client, **common, out=Output(out, "append")).run(2)

    run(body())
    names = sorted(record.trajectory_id for record in RunReader(out))
    assert names == ["b1/t0/0", "b1/t1/0", "b2/t0/0", "b2/t1/0", "t0/0", "t1/0"]


def test_sync_client_streams_and_runs(model_dir: str) -> None:
    with (
        shared_cluster_sync(engines=1) as client,
        Rollout(client, env=ToolAgent(steps=2), model=model_dir, engines=emulated(model_dir)) as rollout,
    ):
        names = {record.trajectory_id for record in rollout.stream(3)}
        assert names == {"t0/0", "t1/0", "t2/0"}
        batch = rollout.run(["prompt one", "prompt two"])
        assert sorted(record.task_id for record in batch) == ["task-0", "task-1"]
        assert "2 trajectories" in batch._repr_html_()


def test_futures_are_released_and_keys_share_two_prefixes(model_dir: str) -> None:
    async def body() -> None:
        async with (
            shared_cluster(engines=1) as client,
            Rollout(client, env=ToolAgent(steps=2), model=model_dir, engines=emulated(model_dir)) as rollout,
        ):

            def left(dask_scheduler: Any) -> tuple[int, list[str]]:
                return len(dask_scheduler.tasks), sorted(dask_scheduler.task_prefixes)

            _, before = await client.run_on_scheduler(left)
            await rollout.run(4)
            await rollout.run(4)

            for _ in range(100):
                tasks, prefixes = await client.run_on_scheduler(left)
                if tasks == 0:
                    break
                await asyncio.sleep(0.05)
            assert tasks == 0
            assert prefixes == sorted({"llm", "tool", *before})

    run(body())


def test_a_cluster_without_tagged_workers_is_named_within_bounded_time(model_dir: str) -> None:
    async def body() -> None:
        async with (
            LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0", asynchronous=True) as plain,
            Client(plain, asynchronous=True) as client,
        ):
            rollout = Rollout(
                client,
                env=ToolAgent(),
                model=model_dir,
                engines=Engines(spec=emulated(model_dir), patience=Patience(workers_s=0.5)),
            )
            with pytest.raises(BadInput, match=r"has 0 of 1 worker\(s\) .* --resources ENGINE=1"):
                await rollout.run(1)

    run(body())


def test_an_engine_that_does_not_start_is_named_with_its_reason(model_dir: str) -> None:
    async def body() -> None:
        async with shared_cluster(engines=1) as client:
            spec = emulated(model_dir, faults={"fail_start": "no memory today"})
            rollout = Rollout(client, env=ToolAgent(), model=model_dir, engines=spec)
            with pytest.raises(BadInput, match=r"an engine does not start on worker .*: .*no memory today"):
                await rollout.run(1)

    run(body())


def test_a_failure_inside_the_plugin_is_raised_at_the_client(model_dir: str) -> None:
    def sabotage(dask_scheduler: Any) -> None:
        def broken(event: Any) -> Any:
            raise RuntimeError("the controller is broken")

        dask_scheduler.plugins["heddle"].control.controller.handle = broken

    async def body() -> None:
        async with (
            cluster(engines=1, nannies=False) as (_, client),
            Rollout(client, env=ToolAgent(), model=model_dir, engines=emulated(model_dir)) as rollout,
        ):
            await rollout.run(1)
            await client.run_on_scheduler(sabotage)
            with pytest.raises(ControlPlaneFailed, match="the controller is broken"):
                await rollout.run(2)

    run(body())
