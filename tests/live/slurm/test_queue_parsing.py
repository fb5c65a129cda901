"""What SLURM's commands print."""

from __future__ import annotations

import time

import pytest

from heddle_dask.live.clusters.slurm.queue_parsing import (
    can_never_start,
    job_id_of,
    observations,
    only_busy,
    refusal,
)
from heddle_dask.live.clusters.slurm.replacement import JobPhase, Observation

NAMES = {"11": "gpu-0", "12": "gpu-1", "13": "cpu-0", "14": "cpu-1", "15": "cpu-2", "16": "cpu-3"}
PRINTED = """11|RUNNING|{end}|None
12|PENDING|N/A|Resources
13|PENDING|N/A|PartitionTimeLimit
14|PREEMPTED|2026-11-24T10:00:00|Preempted
15|TIMEOUT|2026-11-24T10:00:00|TimeLimit
99|RUNNING|N/A|None
"""


def test_squeue_says_where_each_job_is_and_a_job_it_does_not_name_has_ended() -> None:
    wall_s = 1_700_000_000.0
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(wall_s + 90))
    assert observations(PRINTED.format(end=end), NAMES, 1000.0, wall_s) == {
        "gpu-0": Observation(JobPhase.RUNNING, ends_s=1090.0),
        "gpu-1": Observation(JobPhase.PENDING, "Resources"),
        "cpu-0": Observation(JobPhase.REFUSED, "PartitionTimeLimit"),
        "cpu-1": Observation(JobPhase.ENDED, "it was preempted (Preempted)"),
        "cpu-2": Observation(JobPhase.ENDED, "its walltime has passed", planned=True),
        "cpu-3": Observation(JobPhase.ENDED, "SLURM knows it no more"),
    }


@pytest.mark.parametrize(
    "reason",
    [
        "PartitionTimeLimit",
        "BadConstraints",
        "ReservationDeleted",
        "InvalidQOS",
        "AssocMaxWallDurationPerJobLimit",
        "AssocMaxCpuPerJobLimit",
        "QOSMaxGRESPerJob",
        "QOSMaxMemoryPerNode",
        "QOSMinCpuNotSatisfied",
        "DependencyNeverSatisfied",
    ],
)
def test_reasons_that_time_does_not_clear(reason: str) -> None:
    assert can_never_start(reason)


@pytest.mark.parametrize(
    "reason",
    [
        "Priority",
        "Resources",
        "AssocMaxJobsLimit",
        "AssocGrpCpuLimit",
        "QOSMaxJobsPerUserLimit",
        "QOSMaxCpuPerUserLimit",
        "QOSGrpNodeLimit",
        "MaxGRESPerAccount",
        "ReqNodeNotAvail, UnavailableNodes:gpu[0-3]",
        "Reservation",
        "BeginTime",
        "JobHeldUser",
        "JobHeldAdmin",
        "PartitionDown",
        "PartitionNodeLimit",
        "Licenses",
        "",
    ],
)
def test_reasons_that_pass_or_that_somebody_may_lift(reason: str) -> None:
    assert not can_never_start(reason)


@pytest.mark.parametrize("printed", ["4711\n", "4711;lab\n", "sbatch: Welcome to the lab, 3 jobs are free\n4711\n"])
def test_the_id_of_a_submitted_job(printed: str) -> None:
    assert job_id_of(printed) == "4711"


def test_an_answer_without_an_id_is_an_error_in_one_line() -> None:
    with pytest.raises(ValueError, match="no job id: it is nice"):
        job_id_of("it is\nnice")


def test_slurms_own_words_are_passed_on() -> None:
    gres = "sbatch: error: Invalid generic resource (gres) specification\nallocation failure: Invalid gres"
    assert refusal(gres) == "Invalid generic resource (gres) specification"
    test_only = "allocation failure: Requested node configuration is not available\n"
    assert refusal(test_only) == "allocation failure: Requested node configuration is not available"
    assert refusal("") == "sbatch failed and printed nothing"
    assert only_busy("allocation failure: Requested nodes are busy")
    assert not only_busy(test_only)
