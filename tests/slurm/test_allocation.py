"""A rollout inside an allocation: the groups are steps of it, and no other job is submitted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from slurm.groups import REPOSITORY, SHARED, rollout_command, write_agents
from slurm.lab import Lab, wait_for

from heddle_dask.records.store import RunReader

pytestmark = pytest.mark.slurm
GROUPS = """
backend = "srun"
[groups.gpu]
role = "rollout"
gres = "gpu:1"
cpus = 1
minimum = 2
maximum = 2
[groups.cpu]
role = "tool"
cpus = 2
"""


def test_groups_are_steps_of_the_allocation_around_the_driver(
    slurm: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SHARED.format(logs=tmp_path / "logs", scratch=tmp_path / "scratch")
    (tmp_path / "slurm.toml").write_text(shared + GROUPS)
    write_agents(tmp_path)
    for name, value in {"STEPS": "4", "TOKENS": "50", "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}.items():
        monkeypatch.setenv(name, value)
    command = shlex.join(rollout_command("run.zarr", "--tasks", "4", "--samples", "2"))
    script = f"#!/bin/bash\ncd {tmp_path}\nexec {command}\n"
    resources = ("-p", "gpu", "-N1", "-c6", "--gres=gpu:2", "-t10", f"--output={tmp_path}/said.txt")
    job = slurm.submit(*resources, script=script)
    wait_for(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), 120, "the rollout does not end")
    said = (tmp_path / "said.txt").read_text()
    assert slurm.state(job) == "COMPLETED", said
    assert json.loads(said.splitlines()[-1])["completed"] == 8
    records = list(RunReader(tmp_path / "run.zarr"))
    engines = {step.engine_id.split("/")[0] for record in records for step in record.steps}
    assert engines == {"gpu-0", "gpu-1"}
    assert slurm.jobs() == {} and list((tmp_path / "scratch").glob("heddle-job-*")) == []
