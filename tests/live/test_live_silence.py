"""A worker whose process is stopped keeps its connections: it is noticed, its work goes on, and no run waits for it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import cloudpickle
import pytest
from distributed import Scheduler, Worker
from worlds.live_agents import ToolAgent
from worlds.live_world import cluster, emulated, run, until, worker_process

from heddle_dask.live.driver.options import Engines, Patience
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.scheduler.worker_watch import WorkerWatch
from heddle_dask.live.wire import _dask_internals
from heddle_dask.live.wire.transport import send
from heddle_dask.live.wire.worker_messages import SilenceReport
from heddle_dask.records.store import RunReader

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_silence_is_counted_in_looks_and_told_once() -> None:
    watch = WorkerWatch(list)

    def look(now_s: float, **heartbeats: float) -> list[tuple[str, float]]:
        return list(watch.news(heartbeats, now_s, (3.0, 6.0)))

    assert look(0.0, a=0.0, b=0.0) == []
    assert [look(now, a=now, b=0.0) for now in (1.0, 2.0)] == [[], []]
    assert look(3.0, a=3.0, b=0.0) == [("b", 3.0)]
    assert look(4.0, a=4.0, b=0.0) == [], "it is told once"
    assert look(5.0, a=5.0, b=4.5) == [("b", 0.0)], "it answers again"
    assert look(500.0, a=5.0, b=4.5) == [], "the scheduler was suspended: one look adds little"
    assert look(501.0, a=500.5, b=4.5) == [("b", 3.0)]
    assert [look(now, a=now, b=4.5) for now in (502.0, 503.0)] == [[], []]
    assert look(504.0, a=504.0, b=4.5) == [("b", 6.0)]
    assert [look(now, a=now, b=4.5) for now in (505.0, 506.0)] == [[], []]
    assert look(507.0, a=507.0) == look(508.0, a=508.0, b=1.0) == [], "it has left; another has its address"


def says_silent(dask_worker: Worker) -> None:
    send(dask_worker, SilenceReport("sandbox service http://h:1 has not answered for 10 s"))


@pytest.mark.cluster
def test_a_stopped_worker_is_named_and_lost_and_the_end_of_a_run_does_not_wait_for_it(
    model_dir: str, tmp_path: Path
) -> None:
    lines: list[str] = []

    def wait_less(dask_scheduler: Scheduler) -> None:
        _dask_internals.SILENT_S = 3.0

    async def body() -> None:
        async with cluster() as (_, client):
            rollout = Rollout(
                client,
                env=ToolAgent(steps=5, tokens=20),
                model=model_dir,
                engines=Engines(spec=emulated(model_dir, seconds_per_token=0.01), patience=Patience(silence_s=6.0)),
                samples=4,
                out=tmp_path / "run.zarr",
                progress=lines.append,
            )
            async with rollout:
                counts = {"completed": 0}
                async for record in rollout.stream(6):
                    counts[record.status] += 1
                    if counts["completed"] == 2:
                        os.kill(worker_process("rollout-0").pid, signal.SIGSTOP)
                assert counts == {"completed": 24}
                assert "worker rollout-0 has not answered for 3 s" in lines
                lost = "worker rollout-0 has not answered for 6 s: it is lost, and its work goes on elsewhere"
                assert lost in lines
                await until(lambda: rollout.progress()["engines_ready"] == 2)
                await client.run(says_silent)
                assert await until(lambda: sum(line.startswith("sandbox service") for line in lines) == 1)
                os.kill(worker_process("tool-0").pid, signal.SIGKILL)
                assert await until(lambda: "worker tool-0 is gone: its work goes on elsewhere" in lines)
                assert not any(line.startswith("worker rollout-0 is gone") for line in lines), "it was told as lost"
                await client.run_on_scheduler(wait_less)
                os.kill(worker_process("rollout-1").pid, signal.SIGSTOP)
            assert len(RunReader(tmp_path / "run.zarr")) == 24
            assert sum(line.startswith("sandbox service") for line in lines) == 1, "all workers said it"

    run(body())
