"""The SLURM of the tests is a real one: jobs run, wait, are refused and see their GPUs."""

from __future__ import annotations

import pytest
from slurm.lab import Lab, LabFailed, running_lab, wait_for

pytestmark = pytest.mark.slurm


def test_a_job_sees_its_gpu_and_its_features(slurm: Lab) -> None:
    command = ("srun", "-p", "gpu", "--gres=gpu:1", "-C", "h200", "printenv", "CUDA_VISIBLE_DEVICES")
    assert slurm.run(*command).strip() in ("0", "1")


def test_jobs_of_a_partition_that_is_down_wait_and_an_inactive_one_refuses_them(slurm: Lab) -> None:
    number = slurm.submit("-p", "down", "--wrap", "true")
    wait_for(lambda: slurm.job_fields(number)["Reason"] == "PartitionDown", 20, "no reason")
    assert slurm.state(number) == "PENDING"
    with pytest.raises(LabFailed, match="inactive"):
        slurm.submit("-p", "inactive", "--wrap", "true")


def test_two_labs_run_side_by_side(slurm: Lab) -> None:
    with running_lab() as other:
        other.submit("-J", "elsewhere", "-p", "down", "--wrap", "true")
        assert "elsewhere" in other.jobs()
        assert "elsewhere" not in slurm.jobs()
