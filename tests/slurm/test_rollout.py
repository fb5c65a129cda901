"""`heddle rollout --cluster slurm.toml` on real SLURM: walltimes that pass, and a driver that is a job itself."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from slurm.groups import (
    REPOSITORY,
    Background,
    journal_kinds,
    rollout_command,
    summary_of,
    write_agents,
    write_cluster_file,
)
from slurm.lab import Lab, wait_for

from heddle_dask.records.store import RunReader

pytestmark = pytest.mark.slurm


CHAIN = """#!/bin/bash
#SBATCH --job-name=driver
#SBATCH --partition=cpu
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --signal=B:TERM@60
#SBATCH --output={directory}/driver-%j.out
cd {directory}
resume=()
[ -e run.zarr ] && resume=(--resume)
exec {command} "${{resume[@]}}"
"""


def test_the_driver_is_a_job_that_ends_and_the_next_one_resumes(
    slurm: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cluster_file(tmp_path, gpu="", cpu="")
    write_agents(tmp_path)
    for name, value in {"STEPS": "12", "TOKENS": "60", "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}.items():
        monkeypatch.setenv(name, value)
    command = shlex.join(rollout_command(tmp_path, "--tasks", "8", "--samples", "1"))
    script = CHAIN.format(directory=tmp_path, command=command)
    first = slurm.submit(script=script)
    wait_for(lambda: journal_kinds(tmp_path).count("step") >= 20, 60, "no steps")
    slurm.run("scancel", "--signal=TERM", "--batch", str(first))
    wait_for(lambda: slurm.state(first) not in ("RUNNING", "COMPLETING"), 60, "the driver goes on")
    wait_for(lambda: not slurm.jobs(), 60, "its jobs go on")
    kinds = journal_kinds(tmp_path)
    done = kinds.count("step")
    assert 20 <= done < 8 * 12
    second = slurm.submit(script=script)
    wait_for(lambda: slurm.state(second) in ("COMPLETED", "FAILED"), 120, "the second driver does not end")
    said = (tmp_path / f"driver-{second}.out").read_text()
    assert slurm.state(second) == "COMPLETED", said
    run = RunReader(tmp_path / "run.zarr")
    assert [record.status for record in run] == ["completed"] * 8
    # No step of the first job is sampled again.
    assert journal_kinds(tmp_path).count("step") <= 8 * 12


def test_a_walltime_passes_and_nothing_is_lost(longer_than_a_walltime: Background) -> None:
    lab, directory = longer_than_a_walltime.lab, longer_than_a_walltime.directory
    summary = summary_of(longer_than_a_walltime.process, directory)
    assert (summary["completed"], summary["failed"], summary["lost"]) == (4, 0, 0)
    with_jobs = list(RunReader(directory / "run.zarr"))
    engines = [step.engine_id.split("/")[0] for record in with_jobs for step in record.steps]
    assert set(engines) >= {"short-0", "short-1"}
    assert {job for record in with_jobs for job in record.metadata["jobs"]} == {"cpu-0"}
    # Moved before its end, not killed at it; the next job was there by then.
    first, second = lab.named("short-0"), lab.named("short-1")
    assert first["JobState"] == "COMPLETED", first
    assert second["SubmitTime"] < first["EndTime"]
