"""An engine that comes in the middle of a run has work, with the default strategy, which keeps trajectories at home."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from distributed import Client
from worlds.live_agents import RecordingWorker, ToolAgent, echo_tool
from worlds.live_world import ENGINE, check_against_engine, descendants, emulated, run, until

from heddle_dask import Rollout, SlurmCluster
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup
from heddle_dask.live.driver.files.recorded_sessions import control_lines as facts_and_lines
from heddle_dask.live.driver.files.recorded_sessions import own_lines, recorded_sessions
from heddle_dask.live.driver.session import open_session
from heddle_dask.records.store import RunReader

pytestmark = pytest.mark.cluster
cloudpickle.register_pickle_by_value(sys.modules[__name__])
TASKS = 10


class WaitingAgent(ToolAgent):
    """Goes on until a file is there, then four steps more: what remains then does not depend on the time before."""

    def __init__(self, gate: Path) -> None:
        super().__init__(steps=150)
        self.gate = gate

    async def solve(self, task: Task, ctx: Context) -> float | None:
        ctx.append("user", task.prompt)
        more = 4
        while more:
            more -= self.gate.exists()
            await ctx.generate(max_tokens=self.tokens, ignore_eos=True)
            ctx.append("tool", await ctx.call(echo_tool, "", self.tool_s))
        return 1.0


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A cluster that is scaled in the documented way; its jobs are processes of this machine."""
    directory = tmp_path_factory.mktemp("late")
    groups = {
        "gpu": WorkerGroup("gpu", "rollout", maximum=2, drain_s=5.0),
        "cpu": WorkerGroup("cpu", "tool", cpus=4, drain_s=5.0),
    }
    (directory / "scratch").mkdir()
    given = {"adaptive": False, "logs": directory / "logs", "scratch": str(directory / "scratch")}
    with SlurmCluster(ClusterPlan(groups, backend="local", **given)) as made:
        yield made


@asynccontextmanager
async def clients(cluster: SlurmCluster) -> AsyncIterator[tuple[Client, Client]]:
    def client() -> Client:
        return Client(cluster.scheduler_address, security=cluster.security, asynchronous=True)

    async with client() as one, client() as other:
        yield one, other


def rollout_of(client: Client, model_dir: str, out: Path) -> Rollout:
    engines = emulated(model_dir, seconds_per_token=0.005, slots=2)
    return Rollout(client, env=WaitingAgent(out.parent / "gate"), model=model_dir, engines=engines, out=out)


def lines_of(out: Path) -> list[Any]:
    """The lines of the journal that are the run's own or of no run."""
    return [line for _, lines in own_lines(facts_and_lines(out)) for line in lines]


def joined(out: Path) -> list[str]:
    return [event[2][0] for event, _ in lines_of(out) if event[0] == "EngineJoined"]


def check_share(*outs: Path) -> None:
    """The engine that has joined last worked for each run, with half of a fair share of what all sampled afterwards."""
    tokens: Counter[str] = Counter()
    for out in outs:
        assert RunReader(out).summary().by_status == {"completed": TASKS}
        assert [session.mismatch for session in recorded_sessions(out)] == [None]
        late, events = joined(out)[-1], [event for event, _ in lines_of(out)]
        since = max(index for index, event in enumerate(events) if event[0] == "EngineJoined")
        steps = [event for event in events[since:] if event[0] == "StepFinished"]
        assert len({step[3] for step in steps}) == 2
        for step in steps:
            tokens[step[3]] += step[4]
    assert tokens[late] >= tokens.total() / 4, tokens


def test_an_engine_that_a_scaled_cluster_adds_works_for_two_runs(
    grown: SlurmCluster, model_dir: str, tmp_path: Path
) -> None:
    outs = tmp_path / "one.zarr", tmp_path / "two.zarr"

    async def body() -> None:
        async with clients(grown) as both:
            rollouts = [rollout_of(client, model_dir, out) for client, out in zip(both, outs, strict=True)]
            running = [asyncio.ensure_future(rollout.run(TASKS)) for rollout in rollouts]
            await until(lambda: all(rollout.progress()["tokens"] > 100 for rollout in rollouts))
            await asyncio.to_thread(grown.scale, gpu=2)
            await until(lambda: all(len(set(joined(out))) == 2 for out in outs))
            (tmp_path / "gate").touch()
            await asyncio.gather(*running)

    run(body())
    check_share(*outs)


def test_an_engine_that_was_restarted_works_in_a_later_run(
    grown: SlurmCluster, model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "run.zarr", tmp_path / "seen.jsonl"
    monkeypatch.setattr(open_session, "RolloutWorker", lambda spec, watch: RecordingWorker(spec, str(seen)))

    async def body() -> None:
        async with clients(grown) as (client, _):
            rollout = rollout_of(client, model_dir, out)
            running = asyncio.ensure_future(rollout.run(TASKS))
            await until(lambda: rollout.progress()["tokens"] > 100 and len(set(joined(out))) == 2)
            max(descendants(ENGINE), key=lambda process: process.create_time()).kill()
            await until(lambda: len(set(joined(out))) == 3)
            (tmp_path / "gate").touch()
            await running

    run(body())
    check_share(out)
    check_against_engine(list(RunReader(out)), seen)
