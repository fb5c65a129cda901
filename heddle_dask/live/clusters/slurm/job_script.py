"""The text of a job: what SLURM is asked for, what the shell prepares, and the launcher that takes the shell's place.

Nothing here reads the environment or writes a file. The credentials are in the text by their paths only.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from heddle_dask.live.clusters.slurm.amounts import slurm_memory, slurm_time
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, Container, WorkerGroup
from heddle_dask.live.wire.messages import HARDWARE_VARIABLE, WEIGHTS_VARIABLE

if TYPE_CHECKING:
    from heddle_dask.live.clusters.credentials import Credentials

_LAUNCHER = Path(__file__).parents[4] / "workers" / "job.py"
# In an image the launcher is where its heddle_dask is, whatever the path here.
_LAUNCHER_OF_IMAGE = (
    "import heddle_dask, pathlib, runpy; "
    'runpy.run_path(str(pathlib.Path(heddle_dask.__file__).parents[1] / "workers/job.py"), run_name="__main__")'
)
_SAFE_DIRECTIVE = re.compile(r"[^\s\"'\\#]*")
# Directories of caches by the variable that names them: each program has one of its own, and a home directory is often
# slow, small or missing on a compute node.
_CACHES = {
    "XDG_CACHE_HOME": "xdg",
    "HF_HOME": "huggingface",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# Set by the job or shell in which the driver runs, and options of another job to `sbatch` and `srun`.
_OF_THE_DRIVERS_JOB = re.compile(
    r"(SLURM_(?!CONF$)|SLURMD_|SBATCH_|SRUN_|SALLOC_|PMI_|PMIX_|CUDA_VISIBLE_DEVICES$|GPU_DEVICE_ORDINAL$|TMPDIR$)"
)


def job_script(
    plan: ClusterPlan,
    group: WorkerGroup,
    job_name: str,
    scheduler_address: str,
    credentials: Credentials | None,
) -> str:
    """The script of one job, for ``sbatch`` or, without its first lines, for any shell.

    Parameters
    ----------
    job_name
        Name of the job and of its worker; several workers are ``NAME-0``, ``NAME-1``, ….
    credentials
        Files that the node reads; None: connections are not encrypted.
    """
    header = _directives(plan, group, job_name) if plan.backend == "slurm" else []
    parts = [
        ["#!/bin/bash", *header],
        group.prologue,
        _caches(plan),
        _environment(plan, group),
        [f"exec {_worker_command(plan, group, job_name, scheduler_address, credentials)}"],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def job_log(logs: Path, job_name: str, job_id: str) -> Path:
    """Where SLURM writes what a job prints."""
    return logs / f"{job_name}-{job_id}.log"


def srun_arguments(plan: ClusterPlan, group: WorkerGroup, job_name: str) -> list[str]:
    """The command before a shell with the script: it runs as a step of this allocation, beside other steps."""
    words = [
        "srun",
        f"--job-name={job_name}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={group.cpus}",
        "--exact",
        # A step takes all GPUs and all memory of the allocation unless it says what it wants.
        f"--gres={group.gres or 'none'}",
        f"--mem={'0' if group.memory_bytes is None else slurm_memory(group.memory_bytes)}",
        "--export=ALL",
    ]
    if group.walltime_s is not None:
        words.append(f"--time={slurm_time(group.walltime_s)}")
    if group.constraint is not None:
        words.append(f"--constraint={group.constraint}")
    return [*words, *group.directives]


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment from which jobs are submitted: without what describes the job in which the driver itself runs.

    Passed on, its number of tasks, its memory or its GPUs would be taken for those of the new job.
    """
    return {name: value for name, value in environ.items() if not _OF_THE_DRIVERS_JOB.match(name)}


def _directives(plan: ClusterPlan, group: WorkerGroup, job_name: str) -> list[str]:
    memory = None if group.memory_bytes is None else slurm_memory(group.memory_bytes)
    logs = None if plan.logs is None else str(job_log(plan.logs, job_name, "%j"))
    options = {
        "job-name": job_name,
        "partition": group.partition,
        "account": group.account,
        "qos": group.qos,
        "reservation": group.reservation,
        "nodes": "1",
        "ntasks": "1",
        "cpus-per-task": str(group.cpus),
        "mem": memory,
        "gres": group.gres,
        "constraint": group.constraint,
        "time": None if group.walltime_s is None else slurm_time(group.walltime_s),
        # To the batch shell alone, whose place the launcher takes: without B: only steps would get it.
        "signal": f"B:USR1@{math.ceil(group.drain_s)}",
        "export": plan.export,
        "output": logs,
    }
    lines = [f"--{name}={_directive_value(value)}" for name, value in options.items() if value is not None]
    # A job that SLURM put back into its queue would return beside its replacement.
    lines.append("--no-requeue")
    return [f"#SBATCH {line}" for line in [*lines, *group.directives]]


def _directive_value(value: str) -> str:
    """A value as ``#SBATCH`` reads it, which is not as a shell does: `#` ends a line, quotes keep blanks."""
    if _SAFE_DIRECTIVE.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _caches(plan: ClusterPlan) -> list[str]:
    scratch = _expanded(plan.scratch)
    # By number: a name of a user need not be that of an account on the node.
    caches = f"{scratch}/heddle-cache-$UID" if plan.caches is None else _expanded(plan.caches)
    return [
        "# On the node's own disk. Each job has its scratch in here, which the worker makes and removes.",
        "umask 077",
        "set -u",
        f'scratch="{scratch}"',
        f'caches="{caches}"',
        "set +u",
        'mkdir -p -- "$scratch" && mkdir -p -m 700 -- "$caches" && [ -O "$caches" ] && [ ! -L "$caches" ] || {',
        '    echo "heddle: $caches cannot be used for caches: set caches or scratch in the cluster file" >&2',
        "    exit 2",
        "}",
        'export TMPDIR="$scratch"',
        *(f'export {name}="$caches/{directory}"' for name, directory in _CACHES.items()),
        *([f'export {WEIGHTS_VARIABLE}="$caches/weights"'] if plan.stage_weights else []),
    ]


def _environment(plan: ClusterPlan, group: WorkerGroup) -> list[str]:
    hardware = {HARDWARE_VARIABLE: group.hardware} if group.hardware else {}
    variables = {**(_OFFLINE if plan.offline else {}), **hardware, **group.env}
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def _worker_command(
    plan: ClusterPlan,
    group: WorkerGroup,
    job_name: str,
    scheduler_address: str,
    credentials: Credentials | None,
) -> str:
    rollout = group.role == "rollout"
    options = {
        "--name": job_name,
        "--role": group.role,
        "--workers": str(group.engines) if rollout else None,
        "--tp-degree": str(group.tp_degree) if rollout else None,
        "--engines-per-gpu": str(group.engines_per_gpu) if group.engines_per_gpu > 1 else None,
        "--cpus": None if rollout else str(group.tool_cpus or group.cpus),
        "--ends-in": None if group.walltime_s is None else f"{group.walltime_s:g}",
        "--drain-s": f"{group.drain_s:g}",
        "--interface": plan.interface,
        "--worker-ports": None if plan.worker_ports is None else "{}:{}".format(*plan.worker_ports),
        "--logs": None if plan.logs is None else str(plan.logs),
    }
    words = [scheduler_address]
    words += [word for name, value in options.items() if value is not None for word in (name, value)]
    if credentials is not None:
        words += credentials.options
    started = shlex.join(_launcher(plan, group.container))
    command = f'{started} {shlex.join(words)} --scratch "$scratch"'
    if group.container is None:
        return command
    return f"{_container(plan, group, group.container, credentials)} {command}"


def _launcher(plan: ClusterPlan, container: Container | None) -> list[str]:
    if container is not None:
        return [container.python, "-c", _LAUNCHER_OF_IMAGE]
    return [plan.python or sys.executable, str(_LAUNCHER)]


def _container(plan: ClusterPlan, group: WorkerGroup, container: Container, credentials: Credentials | None) -> str:
    paths = [] if plan.logs is None else [str(plan.logs)]
    if credentials is not None:
        paths.append(os.path.dirname(credentials.key))
    mounts = [f"{path}:{path}" for path in paths]
    mounts += [bind if ":" in bind else f"{bind}:{bind}" for bind in container.binds]
    options = [shlex.quote(option) for option in container.options]
    if container.runtime == "apptainer":
        gpus = ["--nv"] if group.gpus else []
        binds = [word for mount in mounts for word in ("--bind", shlex.quote(mount))]
        own = ['--bind "$scratch"', '--bind "$caches"']
        return " ".join(["apptainer exec", *gpus, *own, *binds, *options, shlex.quote(container.image)])
    listed = ",".join(['"$scratch:$scratch,$caches:$caches"', *map(shlex.quote, mounts)])
    step = f"srun --ntasks=1 --cpus-per-task={group.cpus} --export=ALL"
    image = f"--container-image={shlex.quote(container.image)} --container-mounts={listed}"
    return " ".join([step, image, *options])


def _expanded(path: str) -> str:
    """A path inside double quotes in which the shell replaces variables, and nothing else (`check_node_path`)."""
    return path.rstrip("/") or "/"
