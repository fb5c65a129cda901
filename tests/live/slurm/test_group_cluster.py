"""A cluster of groups as processes of this machine: it is scaled, jobs are lost and replaced, and it leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import threading
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client
from worlds.live_agents import ToolAgent
from worlds.live_world import emulated, kill, run, until

from heddle_dask import Engines, Patience, Rollout, SlurmCluster
from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.slurm.replacement import JobRecord
from heddle_dask.live.clusters.slurm.scaling import ScalingRule
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup

pytestmark = pytest.mark.cluster


def processes_of(directory: Path) -> list[psutil.Process]:
    """Processes below this one whose command names the directory; others belong to clusters that tests share."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if str(directory) in " ".join(process.cmdline()):
                found.append(process)
    return found


def plan(tmp_path: Path, gpu: dict[str, Any] | None = None, **options: Any) -> ClusterPlan:
    rollout: dict[str, Any] = {"minimum": 0, "initial": 1, "maximum": 3, "drain_s": 20.0, **(gpu or {})}
    groups = {
        "gpu": WorkerGroup("gpu", "rollout", **rollout),
        "cpu": WorkerGroup("cpu", "tool", cpus=4, drain_s=5.0),
    }
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    given = {"adaptive": False, "logs": tmp_path / "logs", "scratch": str(scratch), **options}
    return ClusterPlan(groups=groups, backend="local", **given)


def joined(cluster: SlurmCluster, group: str = "gpu") -> list[JobRecord]:
    return [job for job in cluster.jobs() if job.group == group and job.joined_s is not None and not job.leaving]


def serving(cluster: SlurmCluster) -> set[str]:
    present = {job.name for job in cluster._table.present.values()}
    return {job.name for job in joined(cluster) if job.name in present}


def test_a_group_grows_loses_a_job_and_shrinks_during_a_rollout(model_dir: str, tmp_path: Path) -> None:
    events: list[str] = []

    async def body() -> None:
        cluster = SlurmCluster(plan(tmp_path), asynchronous=True, on_event=events.append)
        async with cluster, Client(cluster, asynchronous=True) as client:
            engine = emulated(model_dir, seconds_per_token=0.01)
            env = ToolAgent(steps=6, tokens=60)
            rollout = Rollout(client, env=env, model=model_dir, engines=engine)
            running = asyncio.ensure_future(rollout.run(24))
            cluster.scale(gpu=2)
            await until(lambda: len(serving(cluster)) == 2)
            victim = joined(cluster)[0]
            kill(int(victim.job_id))
            await until(lambda: len(serving(cluster)) == 2 and victim.name not in serving(cluster))
            cluster.scale(gpu=1)
            await until(lambda: len(serving(cluster)) == 1)
            batch = await running
            assert batch.counts == {"completed": 24}
            cluster.scale(gpu=0)
            await until(lambda: not [job for job in cluster._table.present.values() if job.group == "gpu"])
            assert len(joined(cluster, "cpu")) == 1
            told = [line for line in events if line.startswith(f"{victim.name} is gone: it ended with exit code")]
            assert told and "failure 1 in a row" in told[0]

    run(body())


def test_groups_follow_the_demand_between_minimum_and_maximum(model_dir: str, tmp_path: Path) -> None:
    async def body() -> None:
        rule = ScalingRule(llm_target_s=1.0, hold_s=2.0)
        limits = {"initial": 0, "maximum": 2, "drain_s": 5.0}
        cluster = SlurmCluster(plan(tmp_path, limits, adaptive=True), rule=rule, asynchronous=True)
        async with cluster, Client(cluster, asynchronous=True) as client:
            assert cluster.wanted == {"gpu": 0, "cpu": 1}
            engine = emulated(model_dir, seconds_per_token=0.02)
            env = ToolAgent(steps=4, tokens=60)
            async with Rollout(client, env=env, model=model_dir, engines=engine) as rollout:
                running = asyncio.ensure_future(rollout.run(16))
                await until(lambda: len(serving(cluster)) == 2)
                assert cluster.wanted["gpu"] == 2
                assert (await running).counts == {"completed": 16}
            await until(lambda: cluster.wanted["gpu"] == 0 and not serving(cluster))

    run(body())


def test_a_synchronous_cluster_off_the_main_thread_leaves_nothing(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def work() -> None:
        with SlurmCluster(plan(tmp_path, {"engines": 2}), logs=tmp_path / "logs") as cluster:
            with Client(cluster) as client:
                client.wait_for_workers(3, timeout=60)
                seen["names"] = {worker["name"] for worker in client.scheduler_info(-1)["workers"].values()}
                seen["sum"] = client.submit(sum, (1, 2)).result()
            (key,) = (tmp_path / "logs").glob("tls-*/key.pem")
            seen["mode"] = stat.S_IMODE(key.stat().st_mode)
            seen["page"] = urllib.request.urlopen(cluster.dashboard_link, timeout=20).status
            seen["text"], seen["html"] = repr(cluster), cluster._repr_html_()
            with pytest.raises(BadInput, match="4 jobs of group gpu: its minimum is 0 and its maximum 3"):
                cluster.scale(gpu=4)
            with pytest.raises(BadInput, match="no group 'tpu': the groups are gpu, cpu"):
                cluster.scale(tpu=1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen["names"] == {"gpu-0-0", "gpu-0-1", "cpu-0"}
    assert (seen["sum"], seen["mode"], seen["page"]) == (3, 0o600, 200)
    assert "local: gpu " in seen["text"] and "<td>gpu</td>" in seen["html"]
    assert not list((tmp_path / "logs").glob("tls-*"))
    assert not list((tmp_path / "scratch").glob("heddle-job-*"))
    left = processes_of(tmp_path)
    assert not left


def test_jobs_that_fail_at_their_start_end_the_run_with_the_reason(model_dir: str, tmp_path: Path) -> None:
    events: list[str] = []

    async def body() -> None:
        broken = plan(tmp_path, {"prologue": ("echo no such module; exit 3",)})
        cluster = SlurmCluster(broken, asynchronous=True, on_event=events.append)
        async with cluster, Client(cluster, asynchronous=True) as client:
            engines = Engines(spec=emulated(model_dir), patience=Patience(workers_s=3.0))
            rollout = Rollout(client, env="math", model=model_dir, engines=engines)
            await until(lambda: any("in a row" in line for line in events))
            with pytest.raises(
                BadInput,
                match=r"latest failed job: gpu-\d: it ended with exit code 3: no such module \(log: .*/gpu-\d-job.log",
            ):
                await rollout.run(1)
            rows = [line for line in events if "in a row" in line]
            assert "failure 1 in a row, the next job in 2 s" in rows[0]

    run(body())


def test_the_driver_that_dies_takes_the_jobs_with_it(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        "import sys, time\n"
        "from heddle_dask import SlurmCluster\n"
        "cluster = SlurmCluster(sys.argv[1])\n"
        "while not all(job.joined_s for job in cluster.jobs()): time.sleep(0.1)\n"
        "print('joined', flush=True)\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "local.toml").write_text("backend = 'local'\nlogs = 'logs'\n[groups.cpu]\nrole = 'tool'\ncpus = 2\n")

    async def body() -> None:
        import sys

        driver = await asyncio.create_subprocess_exec(
            sys.executable, str(script), str(tmp_path / "local.toml"), stdout=asyncio.subprocess.PIPE
        )
        assert driver.stdout is not None
        assert await driver.stdout.readline() == b"joined\n"
        family = psutil.Process(driver.pid).children(recursive=True)
        assert family
        os.kill(driver.pid, signal.SIGKILL)
        await driver.wait()
        await until(lambda: not any(process.is_running() for process in family))

    run(body())


def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = {"cpu": WorkerGroup("cpu", "tool", partition="cpu")}
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    logs = tmp_path / "logs"
    with pytest.raises(BadInput, match="sbatch is not installed here"):
        SlurmCluster(ClusterPlan(group, interface="lo"), logs=logs)
    with pytest.raises(BadInput, match="start inside salloc or sbatch"):
        SlurmCluster(ClusterPlan(group, backend="srun", interface="lo"), logs=logs)
    with pytest.raises(BadInput, match="interface ib9"):
        SlurmCluster(ClusterPlan(group, backend="local", interface="ib9"), logs=logs)
    assert not logs.exists()


def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        cluster = SlurmCluster(plan(tmp_path), asynchronous=True)

        async def start() -> None:
            await cluster

        starting = asyncio.ensure_future(start())
        await until(lambda: list((tmp_path / "logs").glob("scheduler.log")))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not list((tmp_path / "logs").glob("tls-*"))
        await until(lambda: not processes_of(tmp_path))

    run(body())
