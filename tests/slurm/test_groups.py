"""Groups of real SLURM jobs, scaled, starved and counted, through the Python API."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from distributed import Client
from slurm.groups import write_cluster_file
from slurm.lab import Lab, wait_for
from worlds.live_agents import ToolAgent
from worlds.live_world import emulated, run, until

from heddle_dask import Rollout, SlurmCluster
from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.slurm.scaling import ScalingRule
from heddle_dask.live.driver.options import Engines, Patience

pytestmark = pytest.mark.slurm

# Jobs come for seconds of work, and go seconds after it.
EAGER = ScalingRule(llm_target_s=2.0, tool_target_s=0.2, hold_s=3.0)


def workers(cluster: SlurmCluster, group: str) -> set[str]:
    """The workers of a group that are there."""
    names = {str(worker["name"]) for worker in cluster.scheduler_info["workers"].values()}
    return {name for name in names if name.startswith(f"{group}-")}


async def roll(
    client: Client, model: str, count: int, engines: int = 1, patience: Patience | None = None, **agent: Any
) -> list[Any]:
    spec = emulated(model, seconds_per_token=0.02, slots=4)
    rollout = Rollout(
        client,
        env=ToolAgent(**agent),
        model=model,
        engines=Engines(spec=spec, count=engines, patience=patience or Patience()),
        strategy="heddle",
    )
    batch = list(await rollout.run(count))
    assert [(record.status, record.detail) for record in batch] == [("completed", "")] * count
    return batch


def test_a_group_goes_from_0_to_2_and_back_with_the_work(slurm: Lab, tmp_path: Path, model_dir: str) -> None:
    path = write_cluster_file(tmp_path, gpu="minimum = 0\nmaximum = 2", cpu="minimum = 0\nmaximum = 1")

    async def body() -> None:
        most = 0
        async with (
            SlurmCluster(path, asynchronous=True, rule=EAGER) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            assert slurm.jobs() == {}
            rolling = asyncio.create_task(roll(client, model_dir, 24, steps=4, tokens=60))
            while not rolling.done():
                most = max(most, len(workers(cluster, "gpu")))
                await asyncio.sleep(0.1)
            batch = await rolling
            engines = {step.engine_id.split("/")[0] for record in batch for step in record.steps}
            assert most == 2 and engines == {"gpu-0", "gpu-1"}
            await until(lambda: not workers(cluster, "gpu") and not workers(cluster, "cpu"))
            await until(lambda: not slurm.jobs())

    run(body())


def test_jobs_that_are_cancelled_or_killed_in_a_step_are_replaced_and_nothing_fails(
    slurm: Lab, tmp_path: Path, model_dir: str
) -> None:
    path = write_cluster_file(tmp_path, gpu="minimum = 2\nmaximum = 2", cpu="")
    told: list[str] = []

    async def body() -> None:
        async with (
            SlurmCluster(path, asynchronous=True, on_event=told.append) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            rolling = asyncio.create_task(roll(client, model_dir, 16, engines=2, steps=5, tokens=100))
            await until(lambda: len(workers(cluster, "gpu")) == 2)
            running = {job.name: job.job_id for job in cluster.jobs() if job.group == "gpu"}
            # A step takes two seconds: one is running whenever this comes. SIGTERM first, SIGKILL five seconds later.
            await asyncio.sleep(3.0)
            slurm.run("scancel", running["gpu-0"])
            await until(lambda: "gpu-2" in workers(cluster, "gpu"))
            assert not rolling.done()
            # No grace, as when a node fails: `scancel --signal=KILL` alone would begin with SIGTERM.
            slurm.run("scancel", "--batch", "--signal=KILL", running["gpu-1"])
            batch = await rolling
            engines = {step.engine_id.split("/")[0] for record in batch for step in record.steps}
            assert "gpu-2" in engines, told

    run(body())
    for name in ("gpu-0", "gpu-1"):
        assert any(line.startswith(f"{name} is gone: ") for line in told), told
    # All engines of this node have loaded one copy of the model.
    staged = tmp_path / "scratch" / f"heddle-cache-{os.getuid()}" / "weights"
    assert len([copy for copy in staged.iterdir() if copy.is_dir()]) == 1


def test_a_node_that_goes_down_costs_no_trajectory(slurm: Lab, tmp_path: Path, model_dir: str) -> None:
    path = write_cluster_file(tmp_path, gpu="minimum = 2\nmaximum = 2", cpu="")
    told: list[str] = []

    async def body() -> None:
        async with (
            SlurmCluster(path, asynchronous=True, on_event=told.append) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            rolling = asyncio.create_task(roll(client, model_dir, 16, engines=2, steps=4, tokens=60))
            await until(lambda: len(workers(cluster, "gpu")) == 2)
            (job,) = [job for job in cluster.jobs() if job.name == "gpu-0"]
            node = slurm.job_fields(int(job.job_id))["NodeList"]
            slurm.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
            try:
                await until(lambda: any(line.startswith("gpu-0 is gone: ") for line in told))
                await rolling
            finally:
                slurm.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)  # unless it is up

    run(body())
    (gone,) = [line for line in told if line.startswith("gpu-0 is gone: ")]
    assert "node failed" in gone, told


def test_a_limit_of_the_site_is_the_present_maximum_and_delays_no_replacement(
    slurm: Lab, tmp_path: Path, model_dir: str
) -> None:
    """The QOS `two` takes two jobs of a user."""
    path = write_cluster_file(tmp_path, gpu='minimum = 1\nmaximum = 4\nqos = "two"', cpu="")
    told: list[str] = []

    async def body() -> None:
        async with (
            SlurmCluster(path, asynchronous=True, rule=EAGER, on_event=told.append) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            rolling = asyncio.create_task(roll(client, model_dir, 24, steps=4, tokens=60))
            await until(lambda: len(workers(cluster, "gpu")) == 2)
            await until(lambda: any("takes 2 jobs" in line for line in told))
            running = {job.name: job.job_id for job in cluster.jobs() if job.group == "gpu"}
            (victim,) = [name for name in running if name == "gpu-0"]
            slurm.run("scancel", running[victim])
            await until(lambda: victim not in workers(cluster, "gpu") and len(workers(cluster, "gpu")) == 2)
            await rolling

    run(body())
    said = [line for line in told if "QOSMaxSubmitJobPerUserLimit" in line]
    assert len(said) == 1 and len(said[0]) < 120, said
    assert said[0].startswith("gpu: SLURM takes 2 jobs at present (QOSMaxSubmitJobPerUserLimit); one more is tried in ")
    assert not any("failure 2 in a row" in line for line in told), told


def test_a_group_whose_jobs_wait_says_why_and_does_not_hold_up_the_others(
    slurm: Lab, tmp_path: Path, model_dir: str
) -> None:
    waiting = 'role = "rollout"\npartition = "down"\nwalltime = "30min"\nminimum = 1'
    path = write_cluster_file(tmp_path, gpu="", late=waiting, cpu="")

    async def body() -> None:
        async with (
            SlurmCluster(path, asynchronous=True) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await roll(client, model_dir, 4)
            (job,) = [job for job in cluster.jobs() if job.group == "late"]
            assert (job.phase, job.reason) == ("pending", "PartitionDown")
            assert "PartitionDown" in cluster._repr_html_()

    run(body())


def test_a_job_that_fails_at_once_is_told_with_its_last_words(slurm: Lab, tmp_path: Path) -> None:
    broken = 'role = "tool"\npartition = "cpu"\nprologue = ["echo no such module; exit 3"]'
    path = write_cluster_file(tmp_path, broken=broken)
    told: list[str] = []

    async def body() -> None:
        async with SlurmCluster(path, asynchronous=True, on_event=told.append) as cluster:
            await until(lambda: any(" is gone: " in line for line in told))
            (job,) = [job for job in cluster.jobs() if job.name == "broken-0"]
            log = tmp_path / "logs" / f"broken-0-{job.job_id}.log"
            assert job.reason == f"it failed (NonZeroExitCode): no such module (log: {log})"

    run(body())


def test_time_in_the_queue_counts_for_no_time_limit(slurm: Lab, tmp_path: Path, model_dir: str) -> None:
    engines = 'role = "rollout"\npartition = "single"\nwalltime = "30min"'
    path = write_cluster_file(tmp_path, alone=engines, cpu="")
    # The only place of the partition is taken for longer than the rollout waits for workers that are not in a queue.
    slurm.submit("-p", "single", "--output=/dev/null", "--wrap", "sleep 8")
    told: list[str] = []

    async def body() -> None:
        async with (
            SlurmCluster(path, asynchronous=True, on_event=told.append) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await roll(client, model_dir, 2, patience=Patience(workers_s=2.0, engines_s=20.0))

    run(body())
    (joined,) = [line for line in told if line.startswith("alone-0 has joined")]
    assert int(joined.split()[3]) >= 5, "it did not have to wait"


DEAF = """#!/bin/sh
echo "scancel: error: Unable to contact slurm controller (connect failure)" >&2
exit 1
"""


def test_jobs_that_cannot_be_cancelled_are_named_and_end_without_a_scheduler(
    slurm: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_cluster_file(tmp_path, gpu="", cpu="")
    deaf = tmp_path / "bin" / "scancel"
    deaf.parent.mkdir()
    deaf.write_text(DEAF)
    deaf.chmod(0o755)
    told: list[str] = []

    async def body() -> None:
        async with SlurmCluster(path, asynchronous=True, on_event=told.append) as cluster:
            await until(lambda: workers(cluster, "gpu") and workers(cluster, "cpu"))
            with monkeypatch.context() as patch:
                patch.setenv("PATH", f"{deaf.parent}{os.pathsep}{os.environ['PATH']}")
                await cluster.close()

    run(body())
    (line,) = [line for line in told if "could not be cancelled" in line]
    assert line.endswith(" ".join(line.split()[1:3])) and "Unable to contact slurm controller" in line
    wait_for(lambda: not slurm.jobs(), 60, "the jobs go on without a scheduler")


COUNTING = """#!/bin/sh
echo "$(date +%s.%N) ${{SLURM_JOB_ID:-driver}}" >> "{calls}"
exec /usr/bin/squeue "$@"
"""


def test_squeue_is_asked_once_per_period_for_all_jobs(
    slurm: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls.txt"
    wrapper = tmp_path / "bin" / "squeue"
    wrapper.parent.mkdir()
    wrapper.write_text(COUNTING.format(calls=calls))
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}")
    path = write_cluster_file(tmp_path, gpu="minimum = 2\nmaximum = 2", cpu="minimum = 2\nmaximum = 2")
    period_s = 2.5
    path.write_text(path.read_text().replace('poll = "1s"', f"poll = {period_s}"))

    def asked_by_the_driver() -> list[float]:
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [float(line.split()[0]) for line in lines if line.endswith(" driver")]

    async def body() -> None:
        async with SlurmCluster(path, asynchronous=True) as cluster:
            await until(lambda: len(workers(cluster, "gpu")) == len(workers(cluster, "cpu")) == 2)
            await until(lambda: len(asked_by_the_driver()) >= 3)

    run(body())
    gaps_s = [late - early for early, late in itertools.pairwise(asked_by_the_driver())]
    assert min(gaps_s) >= period_s - 0.5
    # Four jobs: each asks once when it ends, at most, where SLURM has not told it (before 23.02).
    assert len(calls.read_text().splitlines()) - len(gaps_s) - 1 <= 4


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            'role = "rollout"\npartition = "gpu"\ngres = "gpu:3"',
            "Requested node configuration is not available",
        ),
        ('role = "rollout"\npartition = "gpu"\ngres = "fpga:1"', "Invalid generic resource"),
        ('role = "tool"\npartition = "elsewhere"', "invalid partition"),
        ('role = "tool"\npartition = "cpu"\ncpus = 4\nreservation = "none"', "reservation"),
    ],
    ids=["gpus", "gres", "partition", "reservation"],
)
def test_what_slurm_refuses_is_told_in_its_words_and_nothing_starts(
    slurm: Lab, tmp_path: Path, lines: str, said: str
) -> None:
    path = write_cluster_file(tmp_path, gpu="", odd=lines)

    async def body() -> None:
        with pytest.raises(BadInput) as refused:
            await SlurmCluster(path, asynchronous=True)
        text = str(refused.value)
        assert "\n" not in text and text.startswith("group odd: SLURM refuses its jobs: ") and said in text

    run(body())
    assert slurm.jobs() == {}
    assert not (tmp_path / "logs").exists()
