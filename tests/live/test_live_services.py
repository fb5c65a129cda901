"""Model services on a real cluster: turns on one slot, deaths of a copy and of the worker, and what the run stores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
from distributed import Client
from worlds.integrity import check_integrity
from worlds.live_world import cluster, control_lines, descendants, emulated, run, until, worker_process
from worlds.model_files import AGENT, classifier

from heddle_dask import BadInput, Needs, Pools, Rollout, ServiceReward, ServiceSpec, Task, rewarded
from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay
from heddle_dask.environments.base import ActionFailed, Context
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.live.driver.batch import Batch
from heddle_dask.records.store import RunReader
from heddle_dask.strategies.presets import strategies_of_run

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(560)]

LINES: list[str] = []
SLOT_BYTES = 4 << 20  # each model has 3.2 MiB of weights


async def kill_once_during_a_request(marker: str, victim: str, service: Any) -> list[float]:
    """Score a text; the first time, the process of the service is stopped, or the whole worker dies, while it does."""
    path = Path(marker)
    if not path.exists():
        path.write_text("died")
        served = service.process_id
        os.kill(served, signal.SIGSTOP)  # it will not answer any more
        request = asyncio.ensure_future(service.score(["good"]))
        await asyncio.sleep(0.05)
        if victim == "worker":
            _fork_server, worker, *_ = psutil.Process().parents()
            worker.kill()
        return await request
    return await service.score(["good"])


async def holds_its_loop(service: Any) -> None:
    await service.score(["good"])
    time.sleep(600)


class Judged:
    """Tasks name what happens: ``turns``, ``death``, ``worker``, ``holds`` or ``wide``."""

    name = "judged"

    def __init__(self, markers: Path) -> None:
        self._markers = str(markers)

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [Task(f"turns-{i}", "What is 2+3?") for i in range(count)]

    async def solve(self, task: Task, ctx: Context) -> float | None:
        ctx.append("user", task.prompt)
        await ctx.generate(max_tokens=5, ignore_eos=True)
        kind = task.task_id.partition("-")[0]
        if kind == "turns":
            rounds = []
            for _ in range(2):
                (score,) = await ctx.score("reward-model", ["good"])
                logprobs = await ctx.logprobs("teacher", start=ctx.context_tokens - 5)
                rounds.append([score, *logprobs])
            ctx.metadata["rounds"] = rounds
            ctx.metadata["judged"] = await ctx.judge("teacher", "What is 2+3?", read=str, max_tokens=64)
            with pytest.raises(ActionFailed, match="judge teacher: its reply was cut"):
                await ctx.judge("teacher", "hello", max_tokens=4)
            return rounds[0][0]
        if kind == "holds":
            with pytest.raises(ActionFailed, match=r"holds_its_loop timeout: it ran past its limit of 3\.0 s"):
                await ctx.call(holds_its_loop, needs=Needs(service="reward-model"), timeout_s=3.0)
            (score,) = await ctx.score("reward-model", ["good"])
            return score
        if kind == "wide":
            try:
                await ctx.logprobs("wide-teacher", [1, 2, 3])
            except ActionFailed as error:
                ctx.metadata["refused"] = [error.cause, str(error)]
            return 0.0
        marker = f"{self._markers}/{task.task_id}"
        (score,) = await ctx.call(
            kill_once_during_a_request, marker, kind, needs=Needs(service="reward-model"), kind="reward"
        )
        return float(score)


async def says_nothing(task: Task, ctx: Context) -> None:
    ctx.append("user", task.prompt)
    await ctx.generate(max_tokens=3, ignore_eos=True)


def pools(tmp_path: Path) -> Pools:
    reward = ServiceSpec("reward-model", classifier(tmp_path / "classifier"), "cpu", batch=4, max_tokens=512)
    teacher = ServiceSpec("teacher", AGENT, "cpu", batch=4, max_tokens=512)
    wide = ServiceSpec("wide-teacher", AGENT, "cpu", gpus=(4,))
    return Pools(services=[reward, teacher, wide])


@contextlib.asynccontextmanager
async def judging(tmp_path: Path) -> AsyncIterator[Rollout]:
    async with (
        cluster(1, model_gpus=1, model_slot_bytes=SLOT_BYTES) as (_, client),
        Rollout(
            client,
            env=Judged(tmp_path),
            model=str(AGENT),
            engines=emulated(str(AGENT)),
            pools=pools(tmp_path),
            out=tmp_path / "run.zarr",
            progress=LINES.append,
        ) as rollout,
    ):
        yield rollout


def lines_of(kind: str, lines: list[Any]) -> list[Any]:
    """Events and commands of a kind in a controller's journal."""
    return [row for event, commands in lines for row in (event, *commands) if row[0] == kind]


def test_a_run_that_ends_while_its_service_loads_leaves_it_to_the_other_run(tmp_path: Path) -> None:
    ended: list[dict[str, int]] = []

    rewards: list[float | None] = []

    def rollout(client: Any, services: Pools, env: Any = None) -> Rollout:
        env = env or Judged(tmp_path)
        return Rollout(client, env=env, model=str(AGENT), engines=emulated(str(AGENT)), pools=services)

    async def body() -> None:
        services = pools(tmp_path)
        async with (
            cluster(1, model_gpus=1, model_slot_bytes=SLOT_BYTES) as (made, client),
            Client(made, asynchronous=True) as second,
            Client(made, asynchronous=True) as third,
            rollout(client, services) as first_run,
            rollout(second, services) as other_run,
        ):
            first = asyncio.ensure_future(first_run.run([Task("turns-0", "What is 2+3?")]))
            await until(lambda: descendants("pipelines.model_service"))
            other = asyncio.ensure_future(other_run.run([Task("turns-1", "What is 2+3?")]))
            first_run.interrupt()
            ended.append((await first).counts)
            await first_run.close()
            ended.append((await other).counts)
            scored = rewarded(FunctionEnvironment(says_nothing, name="silent"), ServiceReward("reward-model"))
            async with rollout(third, services, scored) as third_run:
                rewards.extend(each.reward for each in (await third_run.run(["What?", "What?"])).trajectories)
            changed = Pools(services=[ServiceSpec("reward-model", AGENT, "cpu")])
            with pytest.raises(BadInput, match="service reward-model: another run on this cluster"):
                await rollout(third, changed).run(1)

    run(body(), 500)
    assert ended == [{"aborted": 1}, {"completed": 1}]
    assert len(rewards) == 2 and all(reward is not None and np.isfinite(reward) for reward in rewards)


def test_services_take_turns_on_a_slot_too_small_for_both_and_survive_deaths(tmp_path: Path) -> None:
    batches: list[Batch] = []

    async def body() -> None:
        async with judging(tmp_path) as rollout:
            batches.append(await rollout.run(3))
            before = worker_process("model-0").pid
            tasks = [Task(f"{kind}-0", "Die.") for kind in ("holds", "service", "worker", "wide")]
            for task in tasks:
                batches.append(await rollout.run([task]))
            assert await until(lambda: worker_process("model-0").pid != before)

    run(body(), 500)
    assert [batch.counts for batch in batches] == [{"completed": 3}, *[{"completed": 1}] * 4]
    records = {record.task_id: record for batch in batches for record in batch.trajectories}

    # Answers do not depend on what was resident in between.
    turns = [record for name, record in records.items() if name.startswith("turns")]
    for record in turns:
        first, second = record.metadata["rounds"]
        assert len(first) == 1 + 5
        assert second == pytest.approx(first, abs=1e-4)
        assert all(logprob < 0 for logprob in first[1:])
    assert len({round(record.reward or 0.0, 4) for record in turns}) == 1
    assert records["holds-0"].reward == pytest.approx(turns[0].reward, abs=1e-4), "and the worker's loop turned on"
    lost = "service reward-model-0-1 is lost: its process is stopped (SIGSTOP)"
    assert any(line.startswith(lost) and line.endswith("; its work goes on elsewhere") for line in LINES)
    # The request of a copy that was stopped, and of a worker that died, was answered by another one.
    assert records["service-0"].reward == pytest.approx(turns[0].reward, abs=1e-4)
    assert records["worker-0"].reward == pytest.approx(turns[0].reward, abs=1e-4)
    cause, told = records["wide-0"].metadata["refused"]
    assert cause == "lost" and "needs 4 GPUs" in told and "\n" not in told

    lines = control_lines(tmp_path / "run.zarr")
    loads, evictions = lines_of("LoadService", lines), lines_of("EvictService", lines)
    assert len(loads) >= 4 and len(evictions) >= 3
    ((_, died_s, *_),) = lines_of("ServiceLost", lines)
    # The registration of our plugins announces each host anew, before any service is loaded.
    assert any(lost_s > died_s for _, lost_s, *_ in lines_of("HostLost", lines))
    stored = RunReader(tmp_path / "run.zarr")
    replayed = Controller(strategies_of_run(stored.metadata))
    assert list(replay(replayed, lines)) == []
    check_integrity(replayed.state)
    labels = {action.label for action in stored.trajectory(0).actions}
    assert labels == {"score:reward-model", "logprobs:teacher", "judge:teacher"}
    assert len({record.metadata["judged"] for record in turns}) == 1 and "2+3" in turns[0].metadata["judged"]
    assert np.isfinite(stored.trajectory(0).reward)
