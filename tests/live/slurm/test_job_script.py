"""The text of a job."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from distributed.security import Security

import heddle_dask
from heddle_dask.live.clusters.credentials import Credentials
from heddle_dask.live.clusters.slurm.job_script import job_script, srun_arguments, submission_environment
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, Container, WorkerGroup

ADDRESS = "tls://10.0.0.1:8786"
KEYS = Credentials(Security(), Path("/shared/tls/certificate.pem"), Path("/shared/tls/key.pem"))
GPU = WorkerGroup(
    "gpu",
    "rollout",
    partition="gpu",
    account="project1",
    gres="gpu:h100:4",
    cpus=32,
    memory_bytes=256 << 30,
    walltime_s=4 * 3600,
    engines=2,
    tp_degree=2,
    prologue=("module load cuda/12.4",),
    directives=("--exclusive",),
    env={"NCCL_DEBUG": "WARN"},
)
TOOL = WorkerGroup("cpu", "tool", partition="cpu", cpus=8)
LAUNCHER = Path(heddle_dask.__file__).parents[1] / "workers" / "job.py"

GOLDEN = f"""\
#!/bin/bash
#SBATCH --job-name=gpu-0
#SBATCH --partition=gpu
#SBATCH --account=project1
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=262144M
#SBATCH --gres=gpu:h100:4
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --export=ALL
#SBATCH --output=/project/logs/gpu-0-%j.log
#SBATCH --no-requeue
#SBATCH --exclusive

module load cuda/12.4

# On the node's own disk. Each job has its scratch in here, which the worker makes and removes.
umask 077
set -u
scratch="/tmp"
caches="/tmp/heddle-cache-$UID"
set +u
mkdir -p -- "$scratch" && mkdir -p -m 700 -- "$caches" && [ -O "$caches" ] && [ ! -L "$caches" ] || {{
    echo "heddle: $caches cannot be used for caches: set caches or scratch in the cluster file" >&2
    exit 2
}}
export TMPDIR="$scratch"
export XDG_CACHE_HOME="$caches/xdg"
export HF_HOME="$caches/huggingface"
export VLLM_CACHE_ROOT="$caches/vllm"
export TRITON_CACHE_DIR="$caches/triton"
export TORCHINDUCTOR_CACHE_DIR="$caches/inductor"
export CUDA_CACHE_PATH="$caches/cuda"
export FLASHINFER_WORKSPACE_BASE="$caches/flashinfer"

export HF_HUB_OFFLINE=1
export HF_DATASETS_OFFLINE=1
export TRANSFORMERS_OFFLINE=1
export HF_HUB_DISABLE_TELEMETRY=1
export VLLM_NO_USAGE_STATS=1
export DO_NOT_TRACK=1
export NCCL_DEBUG=WARN

exec /env/bin/python {LAUNCHER} tls://10.0.0.1:8786 --name gpu-0 --role rollout --workers 2 --tp-degree 2 \
--ends-in 14400 --drain-s 120 --interface ib0 --worker-ports 40000:40100 --logs /project/logs \
--tls-ca-file /shared/tls/certificate.pem --tls-cert /shared/tls/certificate.pem --tls-key /shared/tls/key.pem \
--scratch "$scratch"
"""


def plan(*groups: WorkerGroup, **fields) -> ClusterPlan:
    return ClusterPlan(groups={group.name: group for group in groups}, **fields)


def last_line(group: WorkerGroup, credentials: Credentials | None = None, **fields) -> str:
    return job_script(plan(group, **fields), group, f"{group.name}-0", ADDRESS, credentials).splitlines()[-1]


def variables_of(script: str, names: tuple[str, ...], **environment: str) -> list[str]:
    """What the shell has in variables where the script would become the launcher."""
    lines = script.splitlines()
    assert lines[-1].startswith("exec ")
    shown = [*lines[:-1], *(f'printf "%s\\n" "${name}"' for name in names)]
    told = subprocess.run(
        ["bash"],
        input="\n".join(shown),
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", **environment},
    )
    return told.stdout.splitlines()


def test_the_whole_script():
    whole = plan(
        GPU,
        interface="ib0",
        worker_ports=(40000, 40100),
        logs=Path("/project/logs"),
        python="/env/bin/python",
    )
    assert job_script(whole, GPU, "gpu-0", ADDRESS, KEYS) == GOLDEN


def test_a_tool_job_and_what_is_left_out():
    assert last_line(TOOL) == (
        f"exec {sys.executable} {LAUNCHER} {ADDRESS} --name cpu-0 --role tool --cpus 8 --drain-s 120 "
        '--scratch "$scratch"'
    )
    script = job_script(plan(TOOL), TOOL, "cpu-0", ADDRESS, None)
    for option in ("--mem", "--time", "--gres", "--account", "--output", "--tls", "--ends-in"):
        assert option not in script


def test_a_job_of_a_trainer():
    trainer = WorkerGroup("trainer", "trainer", partition="gpu", gres="gpu:4", cpus=16)
    assert last_line(trainer).endswith('--role trainer --cpus 16 --drain-s 120 --scratch "$scratch"')


def test_weights_are_staged_in_the_caches_of_the_node_if_the_plan_says_so(tmp_path: Path):
    group = dataclasses.replace(TOOL, role="rollout", tool_cpus=0)
    script = job_script(plan(group, caches=str(tmp_path), stage_weights=True), group, "gpu-0", ADDRESS, None)
    assert variables_of(script, ("HEDDLE_WEIGHTS",)) == [f"{tmp_path}/weights"]
    assert "HEDDLE_WEIGHTS" not in GOLDEN


def test_no_credential_is_in_the_text(tmp_path: Path):
    credentials = Credentials.temporary(tmp_path)
    script = job_script(plan(GPU), GPU, "gpu-0", ADDRESS, credentials)
    assert str(credentials.key) in script
    for line in (
        *credentials.key.read_text().splitlines(),
        *credentials.certificate.read_text().splitlines(),
    ):
        assert line not in script
    assert credentials.key.stat().st_mode & 0o777 == 0o600


def test_directives_are_read_as_slurm_reads_them():
    group = dataclasses.replace(TOOL, constraint='a b#"c"', account="x\\y")
    script = job_script(plan(group), group, "cpu-0", ADDRESS, None)
    assert '#SBATCH --constraint="a b#\\"c\\""\n' in script
    assert '#SBATCH --account="x\\\\y"\n' in script


@pytest.mark.parametrize("backend", ["srun", "local"])
def test_outside_sbatch_there_are_no_directives(backend):
    script = job_script(plan(TOOL, backend=backend), TOOL, "cpu-0", ADDRESS, None)
    assert "SBATCH" not in script
    assert script.startswith("#!/bin/bash\n\n")


def test_containers_surround_the_launcher():
    image = Container("apptainer", "/images/my heddle.sif", ("/data", "/a:/b:ro"), ("--cleanenv",))
    line = last_line(dataclasses.replace(GPU, container=image), KEYS, logs=Path("/logs"))
    assert line.startswith(
        'exec apptainer exec --nv --bind "$scratch" --bind "$caches" --bind /logs:/logs '
        "--bind /shared/tls:/shared/tls --bind /data:/data --bind /a:/b:ro --cleanenv '/images/my heddle.sif' "
        "python3 -c 'import heddle_dask, pathlib, runpy; "
    )
    assert "--nv" not in last_line(dataclasses.replace(TOOL, container=image))
    squashed = dataclasses.replace(image, runtime="pyxis", python="/opt/bin/python")
    line = last_line(dataclasses.replace(GPU, container=squashed), KEYS)
    assert line.startswith(
        "exec srun --ntasks=1 --cpus-per-task=32 --export=ALL --container-image='/images/my heddle.sif' "
        '--container-mounts="$scratch:$scratch,$caches:$caches",/shared/tls:/shared/tls,/data:/data,/a:/b:ro '
        "--cleanenv /opt/bin/python -c "
    )


def test_the_launcher_of_an_image_is_that_of_its_package(tmp_path: Path):
    """The line works in a shell: it starts workers/job.py of the heddle_dask that this Python imports."""
    (tmp_path / "heddle_dask").mkdir()
    (tmp_path / "heddle_dask" / "__init__.py").touch()
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "job.py").write_text("import sys; print(__name__, __file__, sys.argv[1:4])")
    image = Container("apptainer", "x", python=sys.executable)
    line = last_line(dataclasses.replace(TOOL, container=image))
    command = line[line.index(f"{sys.executable} -c") :]
    told = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path, env={})
    assert told.stdout == f"__main__ {tmp_path}/workers/job.py ['{ADDRESS}', '--name', 'cpu-0']\n"


def test_the_shell_makes_private_caches(tmp_path: Path):
    group = dataclasses.replace(TOOL, env={"A": "it's $HOME", "HF_HOME": "/models"})
    script = job_script(plan(group, scratch="$BASE/x/", caches="${BASE}/caches"), group, "cpu-0", ADDRESS, None)
    told = variables_of(script, ("scratch", "TMPDIR", "VLLM_CACHE_ROOT", "A", "HF_HOME"), BASE=str(tmp_path))
    assert told == [f"{tmp_path}/x", f"{tmp_path}/x", f"{tmp_path}/caches/vllm", "it's $HOME", "/models"]
    assert (tmp_path / "x").is_dir()
    assert (tmp_path / "caches").stat().st_mode & 0o777 == 0o700


def test_caches_of_somebody_else_are_refused(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "caches").symlink_to(tmp_path / "elsewhere")
    script = job_script(plan(TOOL, scratch=str(tmp_path), caches=f"{tmp_path}/caches"), TOOL, "c", ADDRESS, None)
    told = subprocess.run(["bash"], input=script, capture_output=True, text=True)
    assert told.returncode == 2
    assert told.stderr == (
        f"heddle: {tmp_path}/caches cannot be used for caches: set caches or scratch in the cluster file\n"
    )


def test_a_variable_that_the_node_lacks_ends_the_job():
    script = job_script(plan(TOOL, scratch="$NODE_DISK"), TOOL, "cpu-0", ADDRESS, None)
    told = subprocess.run(["bash"], input=script, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert told.returncode != 0
    assert "NODE_DISK: unbound variable" in told.stderr


def test_the_launcher_takes_the_place_of_the_shell(tmp_path: Path):
    """So that the job's signals reach it: it has the shell's process id, and the options as one word each."""
    fake = tmp_path / "python"
    fake.write_text('#!/bin/bash\necho $$ "$#" "${@: -1}"\n')
    fake.chmod(0o755)
    script = job_script(
        plan(TOOL, python=str(fake), scratch=str(tmp_path), logs=Path("/logs of mine")),
        TOOL,
        "c",
        ADDRESS,
        None,
    )
    with subprocess.Popen(["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        told, _ = shell.communicate(script)
    # The launcher's file, the address, and five options with their values.
    assert told.split() == [str(shell.pid), "14", str(tmp_path)]


def test_a_step_asks_for_its_share_of_the_allocation():
    assert srun_arguments(plan(GPU), GPU, "gpu-0") == [
        "srun",
        "--job-name=gpu-0",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=32",
        "--exact",
        "--gres=gpu:h100:4",
        "--mem=262144M",
        "--export=ALL",
        "--time=04:00:00",
        "--exclusive",
    ]
    words = srun_arguments(plan(TOOL), TOOL, "cpu-0")
    assert "--gres=none" in words and "--mem=0" in words


def test_a_job_does_not_inherit_the_drivers_own_job():
    kept = {
        "PATH": "/bin",
        "HOME": "/home/me",
        "SLURM_CONF": "/etc/slurm.conf",
        "MY_TOKEN": "x",
        "SLURMX": "y",
    }
    own = {
        "SLURM_JOB_ID": "1",
        "SLURM_MEM_PER_NODE": "100",
        "SLURM_CONF_X": "",
        "SBATCH_PARTITION": "p",
        "SRUN_CPUS_PER_TASK": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "TMPDIR": "/scratch/1",
        "PMIX_RANK": "0",
    }
    assert submission_environment({**kept, **own}) == kept


@pytest.mark.parametrize("group", [GPU, TOOL], ids=lambda group: group.role)
def test_the_launcher_knows_every_option(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the launcher puts its own directory first
    from workers.job import main

    whole = plan(group, interface="ib0", worker_ports=(40000, 40100), logs=Path("/logs"))
    words = shlex.split(job_script(whole, group, "x-0", ADDRESS, KEYS).splitlines()[-1])
    options = main.make_context("job.py", words[words.index(str(LAUNCHER)) + 1 :]).params
    assert (options["address"], options["name"], options["role"]) == (ADDRESS, "x-0", group.role)
    expected = {"interface": "ib0", "worker_ports": (40000, 40100), "drain_s": 120, "logs": Path("/logs")}
    assert {name: options[name] for name in expected} == expected
    assert options["tls_key"] == KEYS.key
    if group is GPU:
        assert (options["workers"], options["tp_degree"], options["ends_in_s"]) == (2, 2, 4 * 3600)
    else:
        assert options["cpus"] == 8
