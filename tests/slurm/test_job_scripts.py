"""Job scripts on real SLURM: what it accepts, the signals that reach the launcher, steps of one allocation."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm.lab import Lab

from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.slurm.job_script import job_script, srun_arguments
from heddle_dask.live.clusters.slurm.queue import SlurmQueue
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, WorkerGroup

pytestmark = pytest.mark.slurm
ADDRESS = "tls://127.0.0.1:1"
GPU = WorkerGroup(
    "gpu",
    "rollout",
    partition="gpu",
    gres="gpu:2",
    constraint="h200",
    cpus=4,
    memory_bytes=2 * 10**9,
    walltime_s=1800,
    engines=2,
    env={"A": "b c"},
    directives=("--exclusive",),
)
CPU = WorkerGroup("cpu", "tool", partition="cpu,short", cpus=2, memory_bytes=1 << 30)
# In place of Python: tells its process id and every signal, in a file of the job's own.
LAUNCHER = """#!/bin/bash
told="$TOLD_IN/$SLURM_JOB_ID"
for name in USR1 TERM; do trap "echo $name >> $told; kill %1; exit 0" $name; done
echo "$$ $(cat /proc/$$/comm) $CUDA_VISIBLE_DEVICES" >> "$told"
sleep 300 & wait
"""


def script_of(group: WorkerGroup, **fields: object) -> str:
    return job_script(ClusterPlan(groups={group.name: group}, **fields), group, f"{group.name}-0", ADDRESS, None)


def wait_for_lines(path: Path, number: int) -> list[str]:
    deadline = time.monotonic() + 60
    while not path.exists() or len(path.read_text().splitlines()) < number:
        assert time.monotonic() < deadline, f"{path} has fewer than {number} lines"
        time.sleep(0.1)
    return path.read_text().splitlines()


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    path = tmp_path / "launcher"
    path.write_text(LAUNCHER)
    path.chmod(0o755)
    return path


def submitted(lab: Lab, script: str) -> str:
    told = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=True)
    return told.stdout.strip()


def test_slurm_accepts_the_scripts_and_its_refusals_are_passed_on(slurm: Lab, tmp_path: Path):
    check = SlurmQueue().check
    for group in (GPU, CPU):
        asyncio.run(check(group.name, script_of(group, logs=tmp_path / "logs of mine")))
    for change, said in (
        ({"gres": "gpu:h900:2"}, "Requested node configuration is not available"),
        ({"gres": "tpu:1", "engines": 0}, "Invalid generic resource"),
        ({"partition": "nowhere"}, "nvalid partition"),
        ({"constraint": "h900"}, "feature"),
    ):
        with pytest.raises(BadInput, match=said):
            asyncio.run(check("gpu", script_of(dataclasses.replace(GPU, **change))))


def test_the_signal_before_the_end_reaches_the_launcher(slurm: Lab, tmp_path: Path, launcher: Path):
    """A walltime of one minute and a drain of 58 s: SLURM warns at once, and the launcher itself gets it."""
    group = dataclasses.replace(CPU, partition="cpu", walltime_s=60.0, drain_s=58.0, env={"TOLD_IN": str(tmp_path)})
    script = script_of(group, python=str(launcher), logs=tmp_path, scratch=str(tmp_path / "scratch"))
    told = tmp_path / submitted(slurm, script)
    first, second = wait_for_lines(told, 2)
    assert first.split()[1] == "launcher"  # the shell's place is taken: no bash waits for it
    assert second == "USR1"


@pytest.mark.parametrize(
    ("scancel", "signal"), [(["--batch", "--signal=USR1"], "USR1"), (["--signal=TERM"], "TERM"), ([], "TERM")]
)
def test_signals_pass_through_the_step_of_a_container(
    slurm: Lab, tmp_path: Path, launcher: Path, scancel: list[str], signal: str
):
    """As with Pyxis, whose `srun` takes the shell's place: it hands SIGUSR1 on, and steps get SIGTERM from SLURM."""
    group = dataclasses.replace(CPU, partition="cpu", env={"TOLD_IN": str(tmp_path)})
    script = script_of(group, python=str(launcher), logs=tmp_path, scratch=str(tmp_path / "scratch"))
    script = script.replace("exec ", "exec srun --ntasks=1 --cpus-per-task=2 --export=ALL ", 1)
    job = submitted(slurm, script)
    wait_for_lines(tmp_path / job, 1)
    subprocess.run(["scancel", *scancel, job], check=True)
    assert wait_for_lines(tmp_path / job, 2)[1] == signal


def test_groups_share_an_allocation_as_steps(slurm: Lab, tmp_path: Path, launcher: Path):
    """Two groups and a second job of one of them run side by side in one allocation; each sees its own GPU."""
    gpu = WorkerGroup("gpu", "rollout", gres="gpu:1", cpus=2, env={"TOLD_IN": str(tmp_path)})
    tool = WorkerGroup("cpu", "tool", cpus=2, env={"TOLD_IN": str(tmp_path)})
    plan = ClusterPlan(
        groups={"gpu": gpu, "cpu": tool},
        backend="srun",
        python=str(launcher),
        scratch=str(tmp_path / "scratch"),
    )
    lines = []
    for name, group in (("gpu-0", gpu), ("gpu-1", gpu), ("cpu-0", tool)):
        path = tmp_path / f"{name}.sh"
        path.write_text(job_script(plan, group, name, ADDRESS, None))
        lines.append(f"{shlex.join(srun_arguments(plan, group, name))} bash {path} &")
    allocation = ["sbatch", "--parsable", "-p", "gpu", "-N1", "-c6", "--gres=gpu:2", "--output=/dev/null"]
    text = "\n".join(["#!/bin/bash", *lines, "wait", ""])
    job = subprocess.run(allocation, input=text, capture_output=True, text=True, check=True).stdout.strip()
    told = wait_for_lines(tmp_path / job, 3)
    assert sorted(" ".join(line.split()[2:]) for line in told) == ["", "0", "1"]


def test_a_rollout_that_slurm_refuses_starts_and_writes_nothing(slurm: Lab, tmp_path: Path):
    """Exit code 2 and one line with SLURM's message; no job, no file."""
    (tmp_path / "c.toml").write_text(
        '[groups.gpu]\nrole = "rollout"\npartition = "gpu"\ngres = "tpu:1"\n'
        '[groups.cpu]\nrole = "tool"\npartition = "cpu"\n'
    )
    heddle = [sys.executable, "-c", "from heddle_dask.cli.main import main; main()"]
    command = [*heddle, "rollout", "--engine", "emulated", "--cluster", "c.toml", "--out", "x.zarr"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 2 and told.stdout == ""
    last = told.stderr.splitlines()[-1]
    assert last.startswith("heddle: group gpu: SLURM refuses its jobs: ") and "Invalid generic resource" in last
    assert [path.name for path in tmp_path.iterdir()] == ["c.toml"]
    assert slurm.jobs() == {}
