"""`python -m benchmarks actions`: small rollouts, the store of their figures, rows and tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.actions.cpu import CpuBench, pods_of
from benchmarks.actions.cpu_job import SETUP_SOURCES, CpuFigures, CpuJob, CpuTask, run_cpu_job
from benchmarks.actions.experiments import EXPERIMENTS
from benchmarks.actions.rows import ActionRow
from benchmarks.actions.software_workload import ACTION_SOURCES, SoftwareWorkload
from benchmarks.command import bench
from benchmarks.experiments import Study
from benchmarks.row_file import RowFile
from benchmarks.runner import Runner
from benchmarks.tables import experiment_tables
from heddle_dask.core.errors import BadInput

SMALL = CpuJob((CpuTask(SoftwareWorkload(), 32),), 3, gpus=32, host_cpus=32)


def test_a_job_gives_the_same_figures_again() -> None:
    first, second = run_cpu_job(SMALL), run_cpu_job(SMALL)
    assert first == second
    assert first.completed == 32 and first.failed == 0
    parts_s = first.run_mean_s + first.queue_mean_s + SMALL.overhead_s
    assert first.act_mean_s == pytest.approx(parts_s) and first.queue_mean_s >= 0


def test_pods_run_the_same_trajectories() -> None:
    ours, pods = run_cpu_job(SMALL), run_cpu_job(pods_of(SMALL))
    assert ours.actions == pods.actions and pods.completed == 32


def test_two_tasks_have_their_own_figures() -> None:
    later = CpuTask(SoftwareWorkload(name="second"), 16, 50.0)
    figures = run_cpu_job(replace(SMALL, tasks=(SMALL.tasks[0], later)))
    assert len(figures.task_s) == 2 and figures.step_s >= figures.task_s[1] + 50.0 - 1e-9


def test_figures_are_kept_in_a_file_and_not_measured_again(tmp_path: Path) -> None:
    path, ran = tmp_path / "figures.jsonl", list[int]()

    def run(job: CpuJob) -> CpuFigures:
        ran.append(job.seed)
        return run_cpu_job(job)

    def figures(code: str, *jobs: CpuJob) -> list[CpuFigures]:
        runner = Runner(RowFile(path), code, lambda line: None)
        return runner.figures(CpuFigures, run, jobs, lambda job, made: f"{job.seed} {made.completed}")

    first = figures("code", SMALL, SMALL)
    second = figures("code", SMALL)
    assert ran == [3] and first[:1] == second and first[0] == run_cpu_job(SMALL)
    figures("other code", SMALL)
    assert ran == [3, 3]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("a\nb\n")
    with pytest.raises(BadInput, match="line 1"):
        RowFile(path)


def test_a_tuned_arm_is_chosen_on_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def run(job: CpuJob) -> CpuFigures:
        seeds.append(job.seed)
        # 8 CPUs are best.
        limit = 0.0 if job.pods is None else job.pods.limit_cpus
        return replace(FIGURES, act_mean_s=2.0 + abs(limit - 8.0))

    monkeypatch.setattr("benchmarks.actions.cpu.run_cpu_job", run)
    bench = CpuBench(Study(Runner(RowFile(), "code", lambda line: None), [0, 1]))
    job, note = bench._tuned_pods(SMALL)
    assert job.pods is not None and job.pods.limit_cpus == 8.0 and note == "limit 8 CPUs"
    assert set(seeds).isdisjoint({0, 1})


FIGURES = run_cpu_job(replace(SMALL, tasks=(CpuTask(SoftwareWorkload(), 16),)))


def test_every_number_of_the_workload_has_a_source() -> None:
    not_numbers = {"wrong_factor", "pool", "name"}
    assert set(SoftwareWorkload.__dataclass_fields__) - not_numbers <= set(ACTION_SOURCES)
    assert {"overhead_s", "sandbox_start_s", "starts_per_s", "exec_s"} <= set(SETUP_SOURCES)


def test_the_table_has_the_columns_that_are_used() -> None:
    row = ActionRow("gpu", "static", 1024, 2.0, gpus=40, ratio=3.4, ratio_least=3.0, ratio_most=4.0)
    lines = experiment_tables([row])
    assert lines[1:4:2] == ["### gpu", "| arm | batch | pool | ACT mean | ratio | range |"]
    assert lines[-1] == "| static | 1,024 | 40 GPUs | 2.00 s | 3.40 | 3.00 to 4.00 |"


def test_experiments_by_name() -> None:
    assert EXPERIMENTS.chosen("cpu-order, cpu-batch") == ["cpu-batch", "cpu-order"]
    assert set(EXPERIMENTS.chosen("all")) == set(EXPERIMENTS.by_name)
    with pytest.raises(BadInput, match="unknown 'gpus'"):
        EXPERIMENTS.chosen("gpus")


def test_the_command_lists_and_refuses(tmp_path: Path) -> None:
    listed = CliRunner().invoke(bench, ["actions", "--experiment", "list"])
    assert listed.exit_code == 0 and all(name in listed.output for name in EXPERIMENTS.by_name)
    refused = CliRunner().invoke(bench, ["actions", "--experiment", "nothing"])
    assert refused.exit_code == 2 and len(refused.output.splitlines()) == 1


def test_rows_are_json() -> None:
    row = ActionRow("cpu-batch", "elastic", 128, 1.23456789, paper_ratio="4.3")
    assert json.loads(json.dumps(row.as_json()))["act_mean_s"] == 1.2346
