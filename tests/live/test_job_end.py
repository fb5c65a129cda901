"""When a job ends: what its environment, ``squeue`` and its options say."""

from __future__ import annotations

import datetime

import pytest

from heddle_dask.live.clusters.job.batch_job import parsed_end, seconds_to_end, warns_early

NOW_S = 1_700_000_000.0
IN_90_S = datetime.datetime.fromtimestamp(NOW_S + 90).strftime("%Y-%m-%dT%H:%M:%S")


@pytest.mark.parametrize(
    ("option_s", "environ", "squeue", "left_s"),
    [
        (None, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": f"{NOW_S + 60:.0f}"}, "not asked", 60.0),
        (None, {"SLURM_JOB_ID": "7"}, IN_90_S, 90.0),
        (None, {"SLURM_JOB_ID": "7"}, "", None),
        (None, {"SLURM_JOB_ID": "7"}, "N/A", None),
        (None, {}, "not asked", None),
        (50.0, {}, "not asked", 50.0),
        # A prologue has taken a minute, or the site allows less than was asked for.
        (150.0, {"SLURM_JOB_ID": "7"}, IN_90_S, 90.0),
        # A step of an allocation that is longer.
        (30.0, {"SLURM_JOB_ID": "7"}, IN_90_S, 30.0),
        (None, {"SLURM_JOB_END_TIME": f"{NOW_S - 5:.0f}"}, "not asked", 0.0),
    ],
)
def test_the_earliest_end_that_is_known_counts(
    option_s: float | None, environ: dict[str, str], squeue: str, left_s: float | None
) -> None:
    def asked(job_id: str) -> str:
        assert squeue != "not asked" and job_id == "7"
        return squeue

    assert seconds_to_end(option_s, environ, NOW_S, asked) == left_s


def test_what_is_no_time_is_no_end() -> None:
    assert parsed_end("Unknown") is None and parsed_end("") is None


@pytest.mark.parametrize(
    ("left_s", "is_early"), [(300.0, False), (170.0, True), (121.0, True), (120.0, False), (5.0, False)]
)
def test_a_warning_up_to_a_minute_early_is_told_from_a_wish(left_s: float, is_early: bool) -> None:
    assert warns_early(left_s, 120.0) is is_early
