"""``--cluster FILE`` with groups: what is refused in one line before anything starts, and what doctor shows."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from heddle_dask.cli.group_cluster import engines_of_groups, plan_of_file
from heddle_dask.cli.main import heddle
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.engines.vllm_command import VllmOptions
from heddle_dask.live.clusters import local
from heddle_dask.live.driver.options import Engines

TOOLS = '[groups.cpu]\nrole = "tool"\npartition = "cpu"\n'
GPUS = '[groups.gpu]\nrole = "rollout"\npartition = "gpu"\n'


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(heddle, [str(argument) for argument in arguments])


def refused(text: str, *options: object) -> str:
    """The one line that refuses a rollout on this cluster file; nothing is written."""
    Path("c.toml").write_text(text)
    result = invoke("rollout", "--engine", "emulated", "--cluster", "c.toml", *options)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert [path.name for path in Path().iterdir()] == ["c.toml"]
    return line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GPUS.replace('partition = "gpu"', "") + TOOLS, "group gpu has no partition"),
        (GPUS + 'walltime = "00:10:00"\n' + TOOLS, "leaves no time to work after an engine's start"),
        (GPUS + "wallclock = 3\n" + TOOLS, "unknown key 'wallclock'"),
        ("slot = 3\n" + GPUS + TOOLS, "--cluster c.toml: the file has unknown key 'slot'"),
        (GPUS, "no group has role = 'tool', and a rollout needs workers for tool calls and rewards: add one"),
        (TOOLS, "no group has role = 'rollout', and a rollout needs workers for engines: add one"),
        ('backend = "slurm"', "there are no groups"),
        (
            GPUS + 'gres = "gpu:2"\n' + GPUS.replace("gpu", "big") + 'tp-degree = 2\ngres = "gpu:2"\n' + TOOLS,
            "engines of a rollout have one TP degree (gpu has 1, big has 2)",
        ),
        (GPUS + "tp-degree = 3\ngres = 'gpu:3'\n" + TOOLS, "TP degree 3 does not divide"),
    ],
)
def test_a_plan_is_refused_before_anything_starts(text, said):
    engine = ["--engine", "vllm"] if "tp-degree = 3" in text else []
    assert said in refused(text, *engine)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            ["--engines", 2],
            "--engines has no effect on the groups of --cluster c.toml: set each group's engines",
        ),
        (["--tool-workers", 2], "--tool-workers has no effect"),
        (["--tool-cpus", 2], "--tool-cpus has no effect"),
        (
            ["--tp", "2,1"],
            "--tp has no effect on the groups of --cluster c.toml: set each group's tp-degree there",
        ),
    ],
)
def test_options_that_the_groups_decide_are_refused(option, said):
    assert said in refused(GPUS + TOOLS, *option)


@pytest.mark.cluster
def test_a_local_worker_that_does_not_join_is_one_line(model_dir, monkeypatch):
    arguments_of = local.worker_arguments

    def to_another_scheduler(_: str, *arguments: Any) -> list[str]:
        monkeypatch.setattr(local, "START_TIMEOUT_S", 1.0)  # the scheduler is there by now
        return arguments_of(f"tls://127.0.0.1:{silent.getsockname()[1]}", *arguments)

    monkeypatch.setattr(local, "worker_arguments", to_another_scheduler)
    # Connections to it are made and never answered: a worker neither joins nor ends within the time limit.
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        result = invoke("rollout", "--engine", "emulated", "--model", model_dir, "--engines", 1, "--out", "run.zarr")
    assert result.exit_code == 2, (result.output, result.exception)
    line = result.stderr.splitlines()[-1]
    assert " has not joined after 1 s (logs: " in line and "Traceback" not in result.stderr


def test_a_file_without_groups_describes_one_local_cluster():
    Path("c.toml").write_text("engines = 2\nslots = 3\ntool-workers = 1\ntool-cpus = 4\n")
    assert plan_of_file(Path("c.toml")) is None
    assert plan_of_file(None) is None
    assert "unknown key 'engins'" in refused("engins = 2")


def test_engines_have_the_degree_of_their_groups(model_dir):
    Path("c.toml").write_text(GPUS + 'tp-degree = 2\ngres = "gpu:4"\nengines = 2\n' + TOOLS)
    plan = plan_of_file(Path("c.toml"))
    assert plan is not None
    asked = Engines("emulated", slots=8, cost={"profile": "qwen3-8b-h100"})
    made = engines_of_groups(asked, plan, model_dir, 512, 3)
    spec = made.spec_for(model_dir, 512, 3)
    assert (spec.tp_degree, spec.slots, spec.max_model_len, spec.kind, made.count) == (
        2,
        8,
        512,
        "emulated",
        None,
    )
    assert isinstance(spec, EngineSpec) and spec.devices == ()
    Path("c.toml").write_text(GPUS + TOOLS)
    plan = plan_of_file(Path("c.toml"))
    assert plan is not None and engines_of_groups(asked, plan, model_dir, 512, 3) is asked


def test_engines_have_the_parts_of_gpus_of_their_groups(model_dir):
    shares = 'engines = 4\nengines-per-gpu = 2\ngres = "gpu:2"\nkv-cache-gib = 6\ngpu-memory-utilization = 0.4\n'
    Path("c.toml").write_text(GPUS + shares + TOOLS)
    plan = plan_of_file(Path("c.toml"))
    assert plan is not None
    spec = engines_of_groups(Engines("vllm"), plan, model_dir, 512, 3).spec_for(model_dir, 512, 3)
    assert spec.engines_per_gpu == 2
    assert spec.options == VllmOptions(kv_cache_gib=6.0, gpu_memory_utilization=0.4)
    printed = invoke("doctor", "--cluster", "c.toml", "--job-scripts").stdout
    assert " --workers 4 --tp-degree 1 --engines-per-gpu 2 " in printed
    too_few = GPUS + shares.replace("gpu:2", "gpu:1") + TOOLS
    assert "4 engines of TP degree 1, 2 on each GPU, need 2 GPUs, and a job asks for 1" in refused(too_few)


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_prints_the_job_scripts():
    Path("c.toml").write_text('logs = "/project/logs"\n' + GPUS + TOOLS)
    printed = invoke("doctor", "--cluster", "c.toml", "--job-scripts").stdout
    assert printed.count("#!/bin/bash\n#SBATCH --job-name=") == 2
    assert "#SBATCH --output=/project/logs/gpu-0-%j.log\n" in printed
    assert " tls://HOST:PORT --name cpu-0 --role tool " in printed
    scripts = json.loads(invoke("doctor", "--cluster", "c.toml", "--job-scripts", "--json").stdout)["job_scripts"]
    assert list(scripts) == ["gpu", "cpu"] and scripts["gpu"] in printed


def test_doctor_checks_the_groups(monkeypatch):
    monkeypatch.setattr("heddle_dask.cli.doctor.checks.run_checks", lambda scheduler, model: iter(()))
    Path("c.toml").write_text('backend = "local"\n' + GPUS + TOOLS)
    result = invoke("doctor", "--cluster", "c.toml")
    assert result.exit_code == 0
    assert "group gpu: rollout, 1 to 1 jobs (backend local)" in result.stdout
    monkeypatch.setenv("PATH", "/nowhere")
    Path("c.toml").write_text(GPUS + TOOLS)
    result = invoke("doctor", "--cluster", "c.toml")
    assert result.exit_code == 1
    assert "sbatch is not installed here" in result.stdout


def test_doctor_says_which_interpreter_and_folders_are_not_there(monkeypatch):
    monkeypatch.setattr("heddle_dask.cli.doctor.checks.run_checks", lambda scheduler, model: iter(()))
    head = f'backend = "local"\npython = "{{}}"\nlogs = "{{}}/logs"\nshared = "{{}}/shared"\n{GPUS}{TOOLS}'
    for python, folder in (("/nowhere/bin/python", "/nowhere"), (sys.executable, Path.cwd())):
        Path("c.toml").write_text(head.format(python, folder, folder))
        result = invoke("doctor", "--cluster", "c.toml")
        said = " ".join(result.stdout.split())
        assert result.exit_code == 0, result.output
        missing = folder == "/nowhere"
        assert ("no such file on this machine: jobs run it on the nodes" in said) is missing
        assert said.count("/nowhere is not on this machine: jobs write there") == 2 * missing


def test_doctor_refuses_a_file_that_is_none():
    for arguments in (["--cluster", "missing.toml"], ["--job-scripts"]):
        result = invoke("doctor", *arguments)
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    Path("c.toml").write_text("engines = 2\n")
    assert "has no groups: give tables [groups.NAME]" in invoke("doctor", "--cluster", "c.toml").stderr


def test_engines_may_take_as_long_to_start_as_their_groups_say(monkeypatch):
    patience = []

    async def run(self):
        patience.append(self.engines.patience.engines_s)
        return 0

    monkeypatch.setattr("heddle_dask.cli.rollout.run.RolloutRun.run", run)
    Path("c.toml").write_text(GPUS + 'start-timeout = "15min"\n' + TOOLS)
    for options in ([], ["--engine-timeout", 30]):
        result = invoke("rollout", "--engine", "emulated", "--cluster", "c.toml", *options)
        assert result.exit_code == 0, result.output
    assert patience == [900, 30]
