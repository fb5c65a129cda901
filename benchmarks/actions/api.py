"""API experiments of ``python -m benchmarks actions``: calls through the pool against direct calls with retries.

ARL-Tangram (section 6.1) compares with direct calls, at most 3 retries on an error or a time-out, and a time-out of
600 s. It names neither quotas nor latencies nor the number of calls: these are swept, and the table has the range.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from benchmarks.actions.api_job import ApiFigures, ApiJob, run_api_job
from benchmarks.actions.rows import ActionRow
from benchmarks.actions.simulated_api import ApiTraits
from benchmarks.experiments import Study
from benchmarks.tables import ratio_fields
from heddle_dask.core.resources import QuotaWindow

TUNING_SEED = 1_000
"""Retries of the tuned baseline are chosen on this seed, and reported on others."""

# Retries and seconds before the first of them; the paper's 3 without a stated back-off are the first two.
GRID = tuple((retries, retry_s) for retries in (3, 6, 10, 20) for retry_s in (0.0, 0.5, 2.0, 8.0))
OVERLOADS: tuple[tuple[Literal["reject", "queue"], bool], ...] = (
    ("reject", False),
    ("reject", True),
    ("queue", False),
)
MOST_FAILED = 0.01
"""A tuned baseline may lose this share of its actions."""


def swept_traits() -> Iterator[tuple[str, ApiTraits]]:
    """APIs that reject (rejected calls count against the quota, or not) or queue, with two quotas and two latencies."""
    for overload, counts in OVERLOADS:
        for rate in (10, 30):
            for latency_s in (0.5, 2.0):
                windows = (QuotaWindow(rate, 1.0), QuotaWindow(40 * rate, 60.0))
                traits = ApiTraits(2 * rate, windows, overload, latency_s, counts_rejected=counts)
                counted = " and counts rejected calls" if counts else ""
                yield f"{overload}s{counted}, {rate} calls/s, {latency_s:g} s", traits


def simulated_rows(study: Study, batches: Sequence[int] = (256, 1024)) -> list[ActionRow]:
    """Direct calls with retries against the pool at the API's quota, in virtual time."""
    rows: list[ActionRow] = []
    for batch in batches:
        for name, traits in swept_traits():
            rows += _rows_of(study, batch, name, traits)
    return rows


def _rows_of(study: Study, batch: int, name: str, traits: ApiTraits) -> list[ActionRow]:
    job = ApiJob(batch, 0, traits=traits)
    direct = replace(job, arm="direct")
    retries, retry_s = tuned_retries(study, direct)
    arms = {
        "pool": job,
        "direct, 3 retries": direct,
        f"direct, tuned: {retries} retries from {retry_s:g} s": replace(direct, retries=retries, retry_s=retry_s),
    }
    figures = {arm: figures_of(study, [replace(each, seed=seed) for seed in study.seeds]) for arm, each in arms.items()}
    return [_row(batch, name, arm, found, figures["pool"]) for arm, found in figures.items()]


def figures_of(study: Study, jobs: Sequence[ApiJob]) -> list[ApiFigures]:
    """The figures of each job."""
    return study.runner.figures(ApiFigures, run_api_job, jobs, _told)


def _told(job: ApiJob, figures: ApiFigures) -> str:
    return f"{job.batch} trajectories, {job.arm}, {job.retries} retries, seed {job.seed}: {figures.step_s:,.1f} s"


def tuned_retries(study: Study, job: ApiJob) -> tuple[int, float]:
    """Retries and back-off with the shortest batch among those that lose few actions; else with the fewest losses."""
    jobs = [replace(job, seed=TUNING_SEED, retries=retries, retry_s=retry_s) for retries, retry_s in GRID]
    judged = [(max(one.failed_share, MOST_FAILED), one.step_s) for one in figures_of(study, jobs)]
    return min(zip(GRID, judged, strict=True), key=lambda pair: pair[1])[0]


def _row(batch: int, name: str, arm: str, figures: Sequence[ApiFigures], pool: Sequence[ApiFigures]) -> ActionRow:
    ratios = [each.act_mean_s / ours.act_mean_s for each, ours in zip(figures, pool, strict=True)]
    failed = statistics.fmean(each.failed_share for each in figures)
    whole = failed <= MOST_FAILED  # the times of an arm that loses its actions are those of failures
    rejected = sum(each.rejected for each in figures) / max(1, sum(each.calls for each in figures))
    return ActionRow(
        experiment="api",
        arm=arm,
        batch=batch,
        act_mean_s=statistics.fmean(each.act_mean_s for each in figures),
        act_p99_s=statistics.fmean(each.act_p99_s for each in figures),
        step_s=statistics.fmean(each.step_s for each in figures),
        **ratio_fields(ratios if whole else []),
        step_ratio=statistics.fmean(a.step_s / b.step_s for a, b in zip(figures, pool, strict=True)) if whole else 0.0,
        paper_ratio="step 1.5",
        seeds=len(figures),
        note=f"API {name}; {failed:.1%} of the actions failed, {rejected:.1%} of the calls rejected",
    )
