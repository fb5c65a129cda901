"""Sweeps on a Dask cluster: the same report byte for byte, and errors in one line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from distributed import LocalCluster

from benchmarks.commands.paper import paper
from heddle_dask.cli import cluster_choice
from heddle_dask.cli.one_line import OneLineGroup
from heddle_dask.cli.plan.command import plan as plan_command
from heddle_dask.cli.simulate import simulate as simulate_command
from heddle_dask.cli.sweep_runs import play_jobs
from heddle_dask.core.errors import BadInput
from heddle_dask.live.wire.messages import TOOL_RESOURCE
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.rollout import Arm
from heddle_dask.sim.sweep import SimulatedWorkload, SimulationJob, run_job
from heddle_dask.workloads.recorded import trace_file

pytestmark = pytest.mark.cluster

SMALL = (
    *("--cluster", "small.toml", "--model", "qwen3-8b", "--trajectories", "32"),
    *("--samples", "4", "--max-context-tokens", "20000", "--seeds", "2"),
)


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """Address of a cluster of two worker processes, started elsewhere than where the tests run."""
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster:
        yield cluster.scheduler_address


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text("gpus = 4\ngpus-per-node = 4\nslots = 8\n")


def invoke(*arguments: object) -> Result:
    group = OneLineGroup("heddle")
    group.add_command(paper)
    group.add_command(plan_command)
    group.add_command(simulate_command)
    return CliRunner().invoke(group, [str(argument) for argument in arguments])


def jobs() -> list[SimulationJob]:
    fleet = Cluster(gpus=4, gpus_per_node=4, slots=8).fleet("qwen3-8b", max_context_tokens=20_000)
    work = SimulatedWorkload("math", 16, 4, 20_000)
    return [SimulationJob(work, fleet, Arm.parse(name), 0, warm=False) for name in ("slime", "verl")]


def test_simulate_gives_the_same_bytes_with_and_without_a_cluster(scheduler: str) -> None:
    arguments = (
        "simulate",
        "--workload",
        "coding",
        *SMALL,
        "--seeds",
        1,
        "--strategy",
        "heddle,slime",
        "--html",
    )
    here = invoke(*arguments, "here.html", "--json")
    there = invoke(*arguments, "there.html", "--json", "--scheduler", scheduler)
    assert here.exit_code == there.exit_code == 0, there.output
    assert here.stdout == there.stdout
    assert Path("here.html").read_bytes() == Path("there.html").read_bytes()
    assert "2 simulations on 2 threads of 2 workers" in there.stderr
    assert "2/2: " in there.stderr and " left\n" in there.stderr
    rows = json.loads(there.stdout)["rows"]
    assert [(row["strategy"], row["seed"]) for row in rows] == [("heddle", 0), ("slime", 0)]


def test_plan_gives_the_same_bytes_with_and_without_a_cluster(scheduler: str) -> None:
    arguments = ("plan", "--workload", "math", *SMALL, "--strategy", "heddle:predictor=oracle")
    more = ("--gpus", "2,4", "--price-per-gpu-hour", "2.5")
    for form in ((), ("--json",)):
        here = invoke(*arguments, *more, *form)
        there = invoke(*arguments, *more, *form, "--scheduler", scheduler)
        assert here.exit_code == there.exit_code == 0, there.output
        assert here.stdout == there.stdout and here.stdout
        assert "4 GPUs, 2 x TP2, seed 1" in there.stderr


def test_the_papers_tables_are_the_same_with_and_without_a_cluster(scheduler: str, tmp_path: Path) -> None:
    """Rows that are there are not made again, wherever the others are made."""
    cluster = tmp_path / "small.toml"
    cluster.write_text("gpus = 4\ngpus-per-node = 4\n", encoding="utf-8")
    arguments = [
        *("paper", "--cells", "qwen3-8b/math", "--cluster", str(cluster), "--trajectories", "16"),
        *("--samples", "4", "--max-context-tokens", "8192", "--seeds", "1", "--json", "--out"),
    ]
    arms = ("--arms", "slime,heddle")
    here = invoke(*arguments, str(tmp_path / "here.jsonl"), *arms)
    assert here.exit_code == 0, here.output
    part = (tmp_path / "here.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:3]
    (tmp_path / "there.jsonl").write_text("".join(part), encoding="utf-8")
    there = invoke(*arguments, str(tmp_path / "there.jsonl"), *arms, "--scheduler", scheduler)
    assert there.exit_code == 0, there.output
    assert there.stdout == here.stdout
    lines = [(tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in ("here", "there")]
    assert sorted(lines[0]) == sorted(lines[1])
    assert " simulations on 2 threads of 2 workers" in there.stderr
    assert "qwen3-8b/math, heddle on " in there.stderr and "qwen3-8b/math, slime on " in there.stderr


def test_a_trace_file_is_read_by_the_workers_wherever_they_run(scheduler: str) -> None:
    Path("mine.jsonl.gz").write_bytes(trace_file("intercode").read_bytes())
    arguments = ("simulate", "--workload", "mine.jsonl.gz", *SMALL, "--seeds", 1, "--strategy", "slime,verl", "--json")
    here, there = invoke(*arguments), invoke(*arguments, "--scheduler", scheduler)
    assert here.exit_code == there.exit_code == 0, there.output
    assert here.stdout == there.stdout


def test_another_file_under_the_same_path_is_refused() -> None:
    path = Path("mine.jsonl.gz")
    path.write_bytes(trace_file("intercode").read_bytes())
    pinned = SimulatedWorkload("mine.jsonl.gz", 8, 1, 32_768).pinned()
    assert Path(pinned.name).is_absolute()
    assert len(pinned.drawn(0)) == 8
    path.write_bytes(trace_file("tau_dialogues").read_bytes())
    with pytest.raises(BadInput, match="not the one that the sweep was asked for"):
        pinned.drawn(0)
    assert SimulatedWorkload("coding", 8, 4, 1000).pinned() == SimulatedWorkload("coding", 8, 4, 1000)


def test_a_recorded_trace_keeps_its_name_and_is_checked_by_content() -> None:
    pinned = SimulatedWorkload("tau_dialogues", 8, 1, 32_768).pinned()
    assert pinned.name == "tau_dialogues"
    assert len(pinned.drawn(0)) == 8
    with pytest.raises(BadInput, match="not the one that the sweep was asked for"):
        replace(pinned, digest="0" * 64).drawn(0)


def test_what_a_worker_refuses_is_one_line(scheduler: str) -> None:
    result = invoke("simulate", "--workload", "cooking", *SMALL, "--scheduler", scheduler)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert "workload 'cooking'" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense"])
def test_a_scheduler_that_does_not_answer_is_one_line(
    command: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_choice, "CONNECT_TIMEOUT_S", 1.0)
    result = invoke(command, "--workload", "math", *SMALL, "--strategy", "slime", "--scheduler", address)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "no Dask scheduler answers" in line


def test_on_workers_tagged_for_rollouts_a_simulation_takes_a_tool_cpu() -> None:
    said: list[str] = []
    with LocalCluster(
        n_workers=1,
        threads_per_worker=8,
        processes=True,
        dashboard_address="127.0.0.1:0",
        resources={TOOL_RESOURCE: 2},
    ) as cluster:
        rollouts = play_jobs(jobs(), scheduler=cluster.scheduler_address, say=said.append)
    assert [one.figures() for one in rollouts] == [run_job(job).figures() for job in jobs()]
    assert "2 simulations on 2 tool CPUs of 1 workers" in said[0]
    assert said[-1].startswith("2/2: ") and "left" not in said[-1]


def test_results_come_back_in_the_order_of_the_jobs_whichever_ends_first(scheduler: str) -> None:
    long, short = jobs()
    long = replace(long, workload=replace(long.workload, trajectories=400))
    said: list[str] = []
    first, second = play_jobs(
        [long, short], scheduler=scheduler, say=said.append, names=["the long one", "the short one"]
    )
    assert (first.trajectories, second.trajectories) == (400, 16)
    assert [line.partition(",")[0] for line in said[1:]] == ["1/2: the short one", "2/2: the long one"]


def test_a_scheduler_that_goes_away_is_one_line() -> None:
    async def lose_it() -> None:
        cluster = await LocalCluster(
            n_workers=0, processes=False, protocol="tcp", dashboard_address="127.0.0.1:0", asynchronous=True
        )
        address = cluster.scheduler_address
        waiting = asyncio.create_task(asyncio.to_thread(play, address))
        await until_submitted(cluster, waiting)
        await cluster.close()
        with pytest.raises(BadInput, match="dropped the sweep"):
            await waiting

    def play(address: str) -> None:
        play_jobs(jobs(), scheduler=address, say=lambda line: None)

    async def until_submitted(cluster: LocalCluster, waiting: asyncio.Task[None]) -> None:
        while len(cluster.scheduler.tasks) < 2 and not waiting.done():
            await asyncio.sleep(0.02)

    asyncio.run(lose_it())
