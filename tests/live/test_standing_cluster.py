"""A cluster that a user has started: a plain scheduler, and workers that were there before the first rollout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest
from distributed import Client, Scheduler
from worlds.live_agents import ToolAgent
from worlds.live_world import emulated, run, until
from worlds.markdown_blocks import ROOT

from heddle_dask.engines.supervised_process import SupervisedProcess
from heddle_dask.live.clusters.worker_command import QUICK_LOOP
from heddle_dask.live.driver.options import Engines
from heddle_dask.live.driver.rollout import Rollout

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.cluster


@contextlib.contextmanager
def started(directory: Path, name: str, *arguments: str) -> Iterator[SupervisedProcess]:
    """A Dask program, as a user starts it."""
    env = {**QUICK_LOOP, "DASK_TEMPORARY_DIRECTORY": str(directory)}
    argv = [sys.executable, "-m", "dask", *arguments, "--dashboard-address", "127.0.0.1:0"]
    process = SupervisedProcess(argv, directory, name, env=env)
    process.launch()
    try:
        yield process
    finally:
        run(process.stop())


async def give_up(address: str, dask_scheduler: Scheduler) -> None:
    """As after a cut of the network, of which worker and nanny know nothing."""
    await dask_scheduler.remove_worker(address, stimulus_id="test", close=False)


def test_the_workers_of_the_readme_wait_for_the_plugin_of_the_first_rollout_and_come_back(
    model_dir: str, tmp_path: Path
) -> None:
    file = tmp_path / "scheduler.json"
    options = ["--host", "127.0.0.1", "--memory-limit", "0"]
    scheduler, engine, tool = (
        line.replace(" ADDRESS", "").split()[1:]
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("dask ")
    )
    assert scheduler == ["scheduler", "--preload", "heddle_dask.preload.scheduler"], "which is left out here"
    standing = ["worker", "--resources", "ENGINE=1", "--preload", "workers.rollout_worker"]
    standing += ["--model", model_dir, "--engine", "emulated"]
    standing += ["--options", json.dumps({"cost": {"seconds_per_token": 0.002}})]
    made = {"engine": engine, "tool": tool, "standing": standing}

    async def body() -> None:
        async with Client(scheduler_file=str(file), asynchronous=True) as client:
            await client.wait_for_workers(3)
            while "LLM" not in str(await client.scheduler.identity(n_workers=-1)):
                await asyncio.sleep(0.05)  # then the engine answers, and nobody has been told of it

            async def work() -> None:
                asked = Engines(spec=emulated(model_dir), count=1)
                async with Rollout(client, env=ToolAgent(steps=2), model=model_dir, engines=asked) as rollout:
                    batch = await rollout.run(8)
                assert batch.counts == {"completed": 8}

            await work()
            logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
            assert not [name for name, text in logs.items() if "Traceback" in text or "KeyError" in text], logs

            async def address_of_tool() -> str:
                workers = (await client.scheduler.identity(n_workers=-1))["workers"]
                return next((address for address, worker in workers.items() if worker["name"] == "tool"), "")

            before = await address_of_tool()
            await client.run_on_scheduler(give_up, before)
            while await address_of_tool() in ("", before):
                await asyncio.sleep(0.05)  # its nanny starts it again
            await work()

    listens = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file)]
    with contextlib.ExitStack() as programs:
        programs.enter_context(started(tmp_path, "scheduler", "scheduler", *listens))
        address = json.loads(run(content(file)))["address"]
        for name, (word, *more) in made.items():
            programs.enter_context(started(tmp_path, name, word, address, *options, "--name", name, *more))
        run(body())


async def content(path: Path) -> str:
    """Of a file that another process writes."""
    return await until(lambda: path.exists() and path.read_text())
