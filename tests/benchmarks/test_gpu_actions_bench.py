"""The GPU experiments of ``benchmarks actions``: rows, accounts of seconds, and the deployments of baselines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.actions.gpu import batch_sizes, paper_pool, pool, static
from benchmarks.actions.gpu_job import (
    GPU_SOURCES,
    GpuWorkload,
    evenly,
    replicas_by_share,
    run_gpu_job,
)
from benchmarks.experiments import Study
from benchmarks.row_file import RowFile
from benchmarks.runner import Runner


def test_copies_are_divided_by_the_shares_and_none_is_without() -> None:
    even = GpuWorkload(services=4, skew=0.0)
    assert replicas_by_share(even, 8) == (2, 2, 2, 2)
    skewed = replicas_by_share(GpuWorkload(services=4, skew=2.0), 8)
    assert sum(skewed) == 8 and min(skewed) == 1 and list(skewed) == sorted(skewed, reverse=True)


def test_seconds_of_an_action_add_up_and_equal_jobs_are_equal() -> None:
    job = replace(pool(96, seed=3), nodes=(8, 4))
    figures = run_gpu_job(job)
    assert figures == run_gpu_job(job)
    assert figures.act_s == pytest.approx(figures.queue_s + figures.overhead_s + figures.run_s)
    assert figures.queue_s >= -1e-9 and figures.loads >= 2


def test_static_services_are_loaded_once_and_wait_for_their_own_gpus_only() -> None:
    job = static(pool(96, seed=3))
    assert job.gpus == 36 and run_gpu_job(job).loads <= 9
    assert evenly(job, 10, (4,)).gpus == 40
    alone = run_gpu_job(replace(paper_pool(pool(96, seed=3)), nodes=(8,) * 5))
    assert alone.run_s == pytest.approx(0.621, rel=1e-6), "alone on four GPUs, as the workload says"


def test_rows_have_what_the_table_shows() -> None:
    study = Study(Runner(RowFile(), "code", lambda line: None), [1])
    rows = batch_sizes(study, batches=[64], services=3)
    arms = [row.arm for row in rows]
    assert len(set(arms)) == len(arms) == 6
    assert rows[0].ratio == 1.0 and rows[0].gpus == 40
    assert all(row.act_mean_s > 0 and row.step_s > 0 for row in rows)


def test_every_number_of_the_workload_has_a_source() -> None:
    assert set(GpuWorkload.__dataclass_fields__) <= set(GPU_SOURCES)


def test_many_requests_of_one_moment_get_what_the_strategy_has_granted() -> None:
    """Elastic units gather the events of a moment; copies that have just become idle belong to their grants."""
    figures = run_gpu_job(pool(1024, seed=1))
    assert 0.3 < figures.run_s < 0.622 and figures.overhead_s < 0.2
