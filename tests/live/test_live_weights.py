"""Published weights reach the engines of a cluster while trajectories run; engines that die come back with them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from worlds.live_agents import ToolAgent
from worlds.live_world import emulated, engine_process, kill, run, until
from worlds.shared_cluster import shared_cluster
from worlds.weight_builders import perturbed

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.live.driver.files.recorded_sessions import recorded_sessions
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.training.weight_control import WeightControl
from heddle_dask.records.store import RunReader
from heddle_dask.weights.model_directory import model_facts
from heddle_dask.weights.store import WeightStore

pytestmark = pytest.mark.cluster


def test_weights_are_fetched_and_installed_while_trajectories_run(model_dir: str, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "store"))
    out = tmp_path / "run.zarr"

    def publish(number: int) -> tuple[PolicyVersion, str]:
        version = PolicyVersion("run-a", number)
        return version, store.write(version, perturbed(model_dir, number), model_facts(model_dir))

    async def body() -> None:
        async with shared_cluster() as client:
            rollout = Rollout(
                client,
                env=ToolAgent(steps=6, tokens=60, tool_s=0.01),
                model=model_dir,
                engines=emulated(model_dir, seconds_per_token=0.004),
                out=out,
            )
            async with rollout:
                running = asyncio.ensure_future(rollout.run(40))
                await until(lambda: rollout.progress().get("generating", 0) > 4)
                assert rollout.session_id is not None
                notes: list[str] = []
                control = WeightControl(client, rollout.session_id, notes.append)
                control.begins(PolicyVersion("run-a", 0), 0)
                first, uri = publish(1)
                control.stepped(first)
                control.published(first, uri, 0)
                await control.switch(first)
                assert {engine.installed for engine in (await control.status()).engines} == {first}

                # One engine dies; it comes back with these weights, and both go over to the next ones.
                killed = {engine.engine_id for engine in (await control.status()).engines}
                kill(engine_process("rollout-0").pid)
                await until_engines(control, lambda now: len(now) == 2 and set(now) != killed)
                assert set((await versions(control)).values()) == {first}
                second, uri = publish(2)
                control.stepped(second)
                control.published(second, uri, 0)
                await control.switch(second)
                assert set((await versions(control)).values()) == {second}
                assert (await running).counts == {"completed": 40}
                assert (await rollout.run(4)).counts == {"completed": 4}
                assert notes == []

    async def versions(control: WeightControl) -> dict[str, PolicyVersion]:
        return {engine.engine_id: engine.installed for engine in (await control.status()).engines}

    async def until_engines(control: WeightControl, condition) -> None:  # type: ignore[no-untyped-def]
        while not condition(await versions(control)):
            await asyncio.sleep(0.02)

    run(body())
    for session in recorded_sessions(out):
        assert session.mismatch is None and session.compared == session.events
    sampled = [record.branches[0].policy_version for record in RunReader(out)]
    numbers = np.concatenate([each[each >= 0] for each in sampled])
    assert set(numbers.tolist()) == {0, 1, 2}
    for each in sampled:
        own = each[each >= 0]
        assert (np.diff(own) >= 0).all(), "a trajectory never goes back to older weights"
