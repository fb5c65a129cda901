"""The CPU pool on a real cluster: two tool workers share a machine, and what goes wrong in an action stays there."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
from distributed import Client
from worlds.live_world import control_lines, emulated, run

from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.needs import Needs
from heddle_dask.environments.base import ActionFailed, Context, Task
from heddle_dask.isolation import process_tree
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import strategies_of_run

pytestmark = [pytest.mark.cluster]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

CORES = sorted(os.sched_getaffinity(0))
MIB = 1 << 20


def runs_a_while() -> tuple[float, float, list[int], str]:
    began_s = time.monotonic()
    time.sleep(0.03)
    return began_s, time.monotonic(), sorted(os.sched_getaffinity(0)), os.environ["HEDDLE_CPUS"]


def prints_and_spins() -> None:
    print("so far")
    while True:
        pass


def allocates(mib: int) -> int:
    return len(bytearray(b"x") * (mib * MIB))


def kills_its_worker_once(marker: str) -> str:
    """The worker starts the fork server, and that this process."""
    if Path(marker).exists():
        return "on another worker"
    server = psutil.Process().parent()
    worker = server.parent() if server is not None else None
    assert worker is not None
    Path(marker).write_text(str(os.getpid()))
    worker.kill()
    while True:
        pass


def waits_for(path: str) -> int:
    while not Path(path).exists():
        time.sleep(0.01)
    return os.getpid()


class Pool:
    """One trajectory for each task; its name says what it does."""

    name = "pool"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[float, float, list[int], str]] = []
        self.failed: dict[str, ActionFailed] = {}
        self.values: dict[str, Any] = {}

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        raise NotImplementedError

    async def solve(self, task: Task, ctx: Context) -> float:
        try:
            await getattr(self, task.prompt)(ctx)
        except ActionFailed as failed:
            self.failed[task.prompt] = failed
        return 1.0

    async def measures(self, ctx: Context) -> None:
        self.seen += await asyncio.gather(*(ctx.call(runs_a_while) for _ in range(8)))

    async def runs_past_its_limit(self, ctx: Context) -> None:
        await ctx.call(prints_and_spins, timeout_s=1.0)

    async def exhausts_its_memory(self, ctx: Context) -> None:
        assert await ctx.call(allocates, 20, needs=Needs(memory="200 MiB")) == 20 * MIB
        await ctx.call(allocates, 600, needs=Needs(memory="200 MiB"))

    async def asks_for_too_much(self, ctx: Context) -> None:
        await ctx.call(allocates, 1, needs=Needs(memory="100 TiB"))

    async def asks_for_an_unknown_pool(self, ctx: Context) -> None:
        await ctx.call(allocates, 1, needs=Needs(pool="cpus"))

    async def is_undisturbed(self, ctx: Context) -> None:
        self.values["undisturbed"] = await ctx.call(waits_for, str(self.folder / "go"))

    async def loses_its_worker(self, ctx: Context) -> None:
        self.values["repeated"] = await ctx.call(kills_its_worker_once, str(self.folder / "marker"))
        (self.folder / "go").touch()


def tasks(*names: str) -> list[Task]:
    return [Task(f"{name}-{number}", name) for number, name in enumerate(names)]


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_two_tool_workers_share_a_machine(model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Other clusters on this machine have claimed cores too.
    folder = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("TMPDIR", folder)
    pool, told = Pool(tmp_path), list[str]()

    async def body() -> None:
        async with (
            LocalRolloutCluster(1, tool_workers=2, tool_cpus=2, dashboard=False, asynchronous=True) as made,
            Client(made, asynchronous=True) as client,
        ):
            rollout = Rollout(
                client,
                env=pool,
                model=model_dir,
                engines=emulated(model_dir),
                out=tmp_path / "run.zarr",
                progress=told.append,
            )
            async with rollout:
                faults = ("runs_past_its_limit", "exhausts_its_memory")
                refused = ("asks_for_too_much", "asks_for_an_unknown_pool")
                batch = await rollout.run(tasks("measures", *faults, *refused, "measures"))
                assert batch.counts == {"completed": 6}, [record.detail for record in batch]
                batch = await rollout.run(tasks("loses_its_worker", "is_undisturbed"))
                assert batch.counts == {"completed": 2}, [record.detail for record in batch]

    run(body(), 240)
    check_cores(pool.seen)
    assert not any("share cores" in line for line in told)
    causes = {name: failed.cause for name, failed in pool.failed.items()}
    assert causes == {
        "runs_past_its_limit": "timeout",
        "exhausts_its_memory": "memory",
        "asks_for_too_much": "lost",
        "asks_for_an_unknown_pool": "lost",
    }
    assert "no worker of pool cpus has joined or is declared; pools: cpu" in str(
        pool.failed["asks_for_an_unknown_pool"]
    )
    assert pool.failed["runs_past_its_limit"].output == "so far\n"
    assert "200 MiB of memory" in str(pool.failed["exhausts_its_memory"])
    assert "102400.0 GiB of memory; the largest worker" in str(pool.failed["asks_for_too_much"])
    assert pool.values["repeated"] == "on another worker"
    killed = int((tmp_path / "marker").read_text())
    assert process_tree.start_of(killed) == 0 and pool.values["undisturbed"] != killed
    lines = control_lines(tmp_path / "run.zarr")
    ended = [line[0] for line in lines if line[0][0] == "ActionFinished"]
    assert {event[7] for event in ended} == {"", "timeout", "memory"}
    assert list(replay(Controller(strategies_of_run(RunReader(tmp_path / "run.zarr").metadata)), lines)) == []


def check_cores(seen: list[tuple[float, float, list[int], str]]) -> None:
    """Actions that ran at the same time had no core in common."""
    assert len(seen) == 16 and all(len(cores) == 1 and cpus == "1" for _, _, cores, cpus in seen)
    for core in CORES:
        spans = sorted((began_s, ended_s) for began_s, ended_s, cores, _ in seen if cores == [core])
        assert all(ended_s <= began_s for (_, ended_s), (began_s, _) in itertools.pairwise(spans))


class Judged:
    """Calls in the pool of all tools, one in a pool of its own, and one in a pool that is not there."""

    name = "judged"

    def __init__(self) -> None:
        self.told: list[str] = []

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [Task(f"t{number}", "judge") for number in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float:
        await ctx.call(allocates, 1, label="plain")
        *_, told = await ctx.call(runs_a_while, needs=Needs(cpus=(1, 8)), label="elastic")
        self.told.append(told)
        await ctx.call(allocates, 1, needs=Needs(pool="judge"), label="judged")
        with pytest.raises(ActionFailed, match=r"no worker of pool jugde .* pools: cpu, judge"):
            await ctx.call(allocates, 1, needs=Needs(pool="jugde"), label="misspelt")
        return 1.0


def test_tool_workers_may_be_a_pool_with_a_name_and_an_elastic_call_has_all_that_idles(
    model_dir: str, tmp_path: Path
) -> None:
    judged = Judged()

    async def body() -> None:
        async with (
            LocalRolloutCluster(1, tool_pools={"judge": 1}, dashboard=False, asynchronous=True) as made,
            Client(made, asynchronous=True) as client,
        ):
            out = tmp_path / "run.zarr"
            rollout = Rollout(client, env=judged, model=model_dir, engines=emulated(model_dir), out=out)
            assert (await rollout.run(4)).counts == {"completed": 4}

    run(body(), 240)
    events = [event for event, _ in control_lines(tmp_path / "run.zarr")]
    hosts = sorted(event[3].partition("/")[0] for event in events if event[0] == "ActionFinished")
    assert hosts == ["tool-0"] * 8 + ["tool-judge"] * 4
    cpus = min(8, os.cpu_count() or 1)
    assert judged.told == [str(cpus)] * 4, "by the default strategy, all that its worker has"


@pytest.mark.parametrize("name", ["", "cpu", "gpu", "a b", "x" * 65])
def test_names_that_no_pool_can_have_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=r"^pool .*: use a name of at most 64 letters"):
        LocalRolloutCluster(1, tool_pools={name: 1})
