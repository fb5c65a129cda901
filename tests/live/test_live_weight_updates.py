"""Weight updates of a live cluster: published by a driver, decided by the controller, installed under running steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from distributed import Client
from worlds.live_agents import ToolAgent
from worlds.live_world import control_lines, emulated, run
from worlds.shared_cluster import shared_cluster
from worlds.weight_builders import perturbed

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.events import SwitchRequested, WeightsPublished
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.journal_codec import decode, replay
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.wire.driver_messages import GetCapacity
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.wire.training_messages import GetWeightStatus, WeightStatus
from heddle_dask.live.wire.transport import ask_scheduler, send
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import strategies_of_run
from heddle_dask.weights.model_directory import model_facts
from heddle_dask.weights.store import WeightStore

pytestmark = pytest.mark.cluster


def version(number: int) -> PolicyVersion:
    return PolicyVersion("run", number)


class Publisher:
    """What a training loop does with weights, without a trainer."""

    def __init__(self, client: Client, model: str, directory: Path) -> None:
        self.client = client
        self.model = model
        self.directory = directory
        self.store = WeightStore(str(directory))
        self.session = ""

    async def find_session(self) -> None:
        while not self.session:
            for name in (await ask_scheduler(self.client, GetCapacity())).sessions:
                self.session = name
            await asyncio.sleep(0.01)

    async def status(self) -> WeightStatus:
        return await ask_scheduler(self.client, GetWeightStatus(self.session))

    async def update(self, number: int) -> None:
        uri = self.store.write(
            version(number), perturbed(self.model, number), model_facts(self.model), bucket_bytes=1_000_000
        )
        send(self.client, Report(self.session, WeightsPublished(UNSTAMPED, version(number), uri)))
        send(self.client, Report(self.session, SwitchRequested(UNSTAMPED, version(number))))
        while {engine.installed for engine in (await self.status()).engines} != {version(number)}:
            await asyncio.sleep(0.01)

    async def refused(self, number: int) -> str:
        """Publish weights that nobody can fetch; returns why."""
        nowhere = str(self.directory / "nowhere" / "manifest.json")
        send(self.client, Report(self.session, WeightsPublished(UNSTAMPED, version(number), nowhere)))
        while not (causes := {engine.cause for engine in (await self.status()).engines if engine.cause}):
            await asyncio.sleep(0.01)
        return min(causes)


def test_engines_go_over_to_published_weights_while_trajectories_run(model_dir: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    async def body() -> str:
        async with (
            shared_cluster() as client,
            Rollout(
                client,
                env=ToolAgent(steps=6, tokens=60),
                model=model_dir,
                engines=emulated(model_dir, seconds_per_token=0.01),
                out=out,
            ) as rollout,
        ):
            publisher = Publisher(client, model_dir, tmp_path / "store")
            batch = asyncio.create_task(rollout.run(4))
            await publisher.find_session()
            while len((await publisher.status()).engines) < 2 or not rollout.progress()["tokens"]:
                await asyncio.sleep(0.01)
            await publisher.update(1)
            await publisher.update(2)
            cause = await publisher.refused(3)
            await batch
            after = await publisher.status()
            assert {engine.installed for engine in after.engines} == {version(2)}
            return cause

    assert "\n" not in run(body())
    reader = RunReader(out)
    seen = set()
    for record in reader:
        assert record.status == "completed"
        (branch,) = record.branches
        sampled = branch.policy_version[branch.policy_version >= 0]
        assert (sampled[1:] >= sampled[:-1]).all(), "versions never decrease along a trajectory"
        seen |= set(sampled.tolist())
    assert len(seen) > 1
    lines = control_lines(out)
    commands = [decode(row) for _, rows in lines for row in rows]
    installs = [c for c in commands if isinstance(c, cmd.InstallWeights)]
    assert [c.version.number for c in installs] == [1, 1, 2, 2]
    ended = [e for line in lines if isinstance(e := decode(line[0]), ev.WeightsInstalled)]
    assert [e.cause for e in ended] == [""] * 4
    assert all(e.paused_s > 0 for e in ended)
    assert list(replay(Controller(strategies_of_run(reader.metadata)), lines)) == []
