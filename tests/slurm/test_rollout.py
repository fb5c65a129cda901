"""`heddle rollout --cluster slurm.toml` on real SLURM: walltimes that pass, and a driver that is a job itself."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
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
from worlds.command_agents import script
from worlds.journal_records import read_journal

from heddle_dask.records.store import RunReader

pytestmark = pytest.mark.slurm


PAGE = (REPOSITORY / "docs" / "slurm.md").read_text()
BLOCKS = re.findall(r"```bash[^\n]*\n(.*?)```", PAGE, re.DOTALL)
LINK = next(block for block in BLOCKS if "#SBATCH --job-name=rollout" in block)
SUBMISSION = next(block for block in BLOCKS if "--dependency=afterany" in block)
PROGRAMS = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)
JOBQUEUE = PAGE.split("python file=own_cluster.py", 1)[1].split("```", 1)[0].split("\n", 1)[1]
OWN = next(block for block in PROGRAMS if "SlurmCluster" in block)
CHECK = next(block for block in BLOCKS if block.startswith("heddle doctor"))


def write_the_documented_chain(directory: Path) -> None:
    """Write ``rollout.sh`` and ``submit.sh`` as the documentation has them, with the options of this rollout."""
    options = rollout_command("run.zarr", "--tasks", "8", "--samples", "1")
    link, replaced = re.subn(
        r"exec heddle rollout .*--out", f"exec {shlex.join(options[:-2])} --out", LINK, flags=re.DOTALL
    )
    assert replaced == 1
    (directory / "rollout.sh").write_text(link.replace("runs/coding.zarr", "run.zarr"))
    # The partitions of the lab have an hour at most; three links are enough.
    text = SUBMISSION.replace("sbatch", "sbatch --time=30").replace("2 3 4 5", "2 3")
    (directory / "submit.sh").write_text(text.replace("job=$(", 'echo "$job"; job=$(') + 'echo "$job"\n')


def test_the_documented_check_asks_slurm_and_submits_nothing(slurm: Lab, tmp_path: Path) -> None:
    write_cluster_file(tmp_path)
    command = f"{shlex.quote(sys.executable)} -c 'from heddle_dask.cli.main import main; main()'"
    script = f'set -e\nheddle() {{ {command} "$@"; }}\n{CHECK}'
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "#SBATCH --partition=gpu" in done.stdout and "#SBATCH --partition=cpu" in done.stdout
    assert not any(name.startswith(("gpu-", "cpu-")) for name in slurm.jobs())


def test_doctor_says_what_the_site_allows_and_what_is_not_there(slurm: Lab, tmp_path: Path) -> None:
    path = write_cluster_file(tmp_path, gpu='maximum = 4\nqos = "two"', cpu="")
    path.write_text(
        f'python = "/nowhere/bin/python"\n{path.read_text()}'.replace('partition = "cpu"', 'partition = "down"')
    )
    command = [
        sys.executable,
        "-c",
        "from heddle_dask.cli.main import main; main()",
        "doctor",
        "--cluster",
        str(path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = " ".join(done.stdout.split())
    assert "QOS two takes 2 jobs at a time, and the group has up to 4" in said, done.stdout + done.stderr
    assert "partition down is down: its jobs wait until it is up" in said
    assert "/nowhere/bin/python" in said and "no such file on this machine" in said


def test_the_documented_chain_of_jobs_goes_on_where_a_link_has_ended(
    slurm: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cluster_file(tmp_path, gpu="", cpu="")
    write_agents(tmp_path)
    write_the_documented_chain(tmp_path)
    for name, value in {"STEPS": "7", "TOKENS": "60", "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}.items():
        monkeypatch.setenv(name, value)
    told = subprocess.run(["bash", "submit.sh"], cwd=tmp_path, capture_output=True, text=True, check=True)
    first, second, third = map(int, told.stdout.split())
    wait_for(lambda: journal_kinds(tmp_path).count("step") >= 12, 90, "no steps")
    # What SLURM does two minutes before the end of a link.
    slurm.run("scancel", "--signal=USR1", "--batch", str(first))
    wait_for(lambda: slurm.state(third) == "COMPLETED", 150, "the chain does not end")
    said = {number: (tmp_path / f"slurm-{number}.out").read_text() for number in (first, second, third)}
    assert slurm.job_fields(first)["ExitCode"] == "75:0", said[first]
    assert slurm.state(second) == "COMPLETED", said[second]
    assert [record.status for record in RunReader(tmp_path / "run.zarr")] == ["completed"] * 8
    # Each step was sampled once: the second link has not repeated what the first one had.
    steps = [body for kind, body in read_journal(tmp_path / "run.journal") if kind == "step"]
    assert len({(body["trajectory_id"], body["step_index"]) for body in steps}) == len(steps) == 8 * 7
    assert "gpu-0 is submitted" in said[second] and "is submitted" not in said[third]


def test_an_agent_that_is_a_command_is_evaluated_on_jobs(slurm: Lab, tmp_path: Path) -> None:
    """The sentence of README: `heddle eval --agent … --tasks … --cluster slurm.toml --samples …`."""
    write_cluster_file(tmp_path)
    agent = script("ask(sys.argv[1]); open('answer.txt', 'w').write('hello')", "obeys")
    words = ", ".join(map(json.dumps, agent.command))
    (tmp_path / "obeys.toml").write_text(f'name = "obeys"\nmemory = "64 MiB"\ncommand = [{words}]\n')
    command = [
        *(sys.executable, "-c", "from heddle_dask.cli.main import main; main()", "eval", "--json"),
        *("--agent", "obeys.toml", "--tasks", "worlds.command_agents:WriteFile", "--tasks", "2", "--samples", "2"),
        *("--engine", "emulated", "--slots", "4", "--cluster", "slurm.toml", "--out", "evaluation"),
    ]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (arm,) = json.loads(done.stdout.splitlines()[-1])["arms"]
    assert (arm["tasks"], arm["samples"], arm["passed"], arm["infrastructure"]) == (2, 4, 4, 0), done.stderr
    (store,) = (tmp_path / "evaluation" / "arms").glob("*.zarr")
    records = list(RunReader(store))
    assert [record.metadata["gateway"]["requests"] for record in records] == [1] * 4
    assert {step.engine_id.split("/")[0] for record in records for step in record.steps} == {"gpu-0"}


def run_program(directory: Path, program: str) -> str:
    """What a documented program prints."""
    (directory / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    logs = [path.read_text() for path in directory.glob("slurm-*.out")]
    assert done.returncode == 0, (done.stderr, logs)
    return done.stdout


def test_the_documented_program_with_groups_of_jobs_runs(slurm: Lab, tmp_path: Path, model_dir: str) -> None:
    write_cluster_file(tmp_path, gpu="maximum = 2", cpu="")
    program = OWN.replace("/project/models/Qwen3-8B", model_dir).replace('"math",', '"math", engines="emulated",')
    program = program.replace("gpu=4", "gpu=2").replace(".run(64)", ".run(4)")
    told = run_program(tmp_path, program)
    assert "gpu-0" in told and "gpu-1" in told
    assert len(RunReader(tmp_path / "runs" / "math.zarr")) == 32


def test_the_documented_cluster_of_dask_jobqueue_runs(slurm: Lab, tmp_path: Path, model_dir: str) -> None:
    """Its workers are there before the scheduler has our plugin."""
    program = JOBQUEUE.replace("/project/models/Qwen3-8B", model_dir).replace('"math"', '"math", engines="emulated"')
    program = program.replace('"cores": 8', '"cores": 2, "interface": "lo"').replace("32GB", "200MB")
    program = program.replace("    Rollout(", "    client.wait_for_workers(2)\n    print(Rollout(", 1).replace(
        ".run(64)", ".run(8).counts)"
    )
    counts = ast.literal_eval(run_program(tmp_path, program))
    logs = [path.read_text() for path in tmp_path.glob("slurm-*.out")]
    assert set(counts) <= {"completed", "truncated"} and sum(counts.values()) == 8
    assert len(logs) == 2 and not any("KeyError" in log for log in logs)


def test_a_walltime_passes_and_nothing_is_lost(longer_than_a_walltime: Background) -> None:
    lab, directory = longer_than_a_walltime.lab, longer_than_a_walltime.directory
    summary = summary_of(longer_than_a_walltime.process, directory)
    assert (summary["completed"], summary["failed"], summary["lost"]) == (4, 0, 0)
    with_jobs = list(RunReader(directory / "run.zarr"))
    engines = [step.engine_id.split("/")[0] for record in with_jobs for step in record.steps]
    assert set(engines) >= {"short-0", "short-1"}
    agent, *others = sorted(with_jobs, key=lambda record: record.task_id)
    assert {job for record in others for job in record.metadata["jobs"]} == {"cpu-0"}
    # It sent each request once: one that was open when the job of its engine had to end was answered all the same.
    asked = agent.metadata["gateway"]
    assert asked == {"requests": agent.metadata["answered"]} and len(agent.steps) == asked["requests"]
    assert {step.engine_id.split("/")[0] for step in agent.steps} >= {"short-0", "short-1"}
    # Moved before its end, not killed at it; the next job was there by then.
    first, second = lab.named("short-0"), lab.named("short-1")
    assert first["JobState"] == "COMPLETED", first
    assert second["SubmitTime"] < first["EndTime"]
