"""The checks of ``heddle doctor``: one line each, with advice where a check fails.

The versions of vllm and torch are read from package metadata, without importing them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from heddle_dask.cli.engine_option import shipped_model
from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.engines.gpu_memory import model_memory
from heddle_dask.engines.gpus import CUDA_DEVICES, InstalledGpu, installed_gpus, named_gpus
from heddle_dask.engines.spec import DEFAULT_KIND, EngineSpec, engine_kind
from heddle_dask.engines.vllm_command import INSTALL_GPU_BUILD, check_model
from heddle_dask.isolation.cgroups import CGROUP_VARIABLE, CgroupTree, find_cgroups
from heddle_dask.isolation.cores import own_cores
from heddle_dask.isolation.mechanism import Mechanism
from heddle_dask.sandbox.images.cache import images_directory
from heddle_dask.sandbox.images.writable_layer import overlay_failure
from heddle_dask.sandbox.python_runner import sandbox_mode

Verdict = Literal["ok", "warn", "fail"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
_GIB = 1 << 30
_LEAST_DISK_GIB = 2
_LEAST_MEMORY_GIB = 4
_LEAST_OPEN_FILES = 4096
# The distributions that bring each module.
_PACKAGES = {name: (name,) for name in ("dask", "distributed", "zarr", "numpy", "tokenizers")} | {
    "xgboost": ("xgboost", "xgboost-cpu")
}


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    Attributes
    ----------
    advice
        What to do; empty if the verdict is ok.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""

    @property
    def colour(self) -> str:
        return _COLOURS[self.verdict]

    def line(self) -> str:
        advice = f": {self.advice}" if self.advice else ""
        return " ".join(f"{self.name}: {self.found}{advice}".split())


def run_checks(scheduler: str | None, model: str | None = None) -> Iterator[Check]:
    """Run all checks; yields each result at once."""
    checks: list[Callable[[], Check]] = [
        _python,
        _packages,
        _engine,
        _accelerator,
        _sandbox,
        _images,
        _actions,
        lambda: _model(model),
        _port,
        _disk,
        _memory,
        _open_files,
        _dashboard,
        _slurm,
    ]
    for check in checks:
        yield check()
    if scheduler is not None:
        yield asyncio.run(_scheduler(scheduler))


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.prefix}")


def _packages() -> Check:
    brought = {
        name: next((f"{each} {version}" for each in distributions if (version := _version(each))), None)
        for name, distributions in _PACKAGES.items()
    }
    missing = [name for name, found in brought.items() if found is None]
    found = ", ".join(filter(None, brought.values()))
    if missing:
        return Check(
            "packages",
            "fail",
            f"{', '.join(missing)} not installed",
            f"run `pip install {' '.join(missing)}`",
        )
    return Check("packages", "ok", found)


def _engine() -> Check:
    """What runs models here: the default kind of engine."""
    kind = engine_kind(DEFAULT_KIND)
    try:
        kind.check_installed()
    except BadInput as error:
        return Check(kind.name, "warn", str(error), "only --engine emulated works without it")
    build = "gpu" if kind.uses_gpus() else "cpu"
    described = kind.described(EngineSpec(kind.name, "model"))
    return Check(kind.name, "ok", f"{described} ({build} build), torch {_version('torch') or 'missing'}")


def _accelerator() -> Check:
    cpus = f"{len(os.sched_getaffinity(0))} CPUs"
    if not CUDA_DEVICES.exists():
        return Check("hardware", "ok", f"{cpus}, no NVIDIA GPU")
    kind = engine_kind(DEFAULT_KIND)
    with contextlib.suppress(BadInput):
        kind.check_installed()
        if not kind.uses_gpus():
            found = f"{cpus}, a GPU that the CPU build of {kind.name} cannot use"
            return Check("hardware", "warn", found, f"in an environment without it, {INSTALL_GPU_BUILD}")
    gpus = installed_gpus()
    if not gpus:
        advice = "engines find a GPU by trying: install nvidia-smi, which comes with the driver"
        return Check("hardware", "warn", f"{cpus}, NVIDIA GPU; nvidia-smi does not answer", advice)
    usable = "all" if (named := named_gpus(os.environ)) is None else ", ".join(named) or "none"
    listed = "; ".join(gpu_line(gpu) for gpu in gpus)
    return Check("hardware", "ok", f"{cpus}; {listed}; CUDA_VISIBLE_DEVICES: {usable}")


def gpu_line(gpu: InstalledGpu) -> str:
    free_gib, all_gib = ((gpu.memory_mib - used) / 1024 for used in (gpu.used_mib, 0))
    return f"GPU {gpu.index} {gpu.name}, {free_gib:.0f} of {all_gib:.0f} GiB free"


def _sandbox() -> Check:
    try:
        mode = sandbox_mode()
    except HeddleError as error:
        return Check("sandbox", "fail", str(error), "tools of agents cannot run")
    if mode == "bubblewrap":
        return Check("sandbox", "ok", "bubblewrap works")
    return Check(
        "sandbox",
        "warn",
        f"only mode '{mode}' works",
        "install the package `bubblewrap`, see docs/sandbox.md",
    )


def _images() -> Check:
    """By what means sandboxes of images (`docs/sandbox.md`) are made here."""
    if shutil.which("bwrap") is None:
        return Check(
            "images", "warn", "no sandboxes of images", "install the package `bubblewrap`, see docs/sandbox.md"
        )
    asked = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, errors="replace").stdout.strip()
    apptainer = shutil.which("apptainer") or shutil.which("singularity") or "no apptainer"
    try:
        failure = overlay_failure(images_directory())
    except HeddleError as error:
        failure = str(error)
    if failure:
        found = f"{asked}, no overlay ({failure}), {apptainer}"
        return Check("images", "warn", found, "each sandbox of an image copies its files: set TMPDIR to a local disk")
    return Check("images", "ok", f"{asked}, overlay of the kernel, {apptainer}")


def _actions() -> Check:
    """By what means a tool worker on this machine keeps its actions apart."""
    cores = own_cores()
    groups = CgroupTree.open(find_cgroups(delegated=os.environ.get(CGROUP_VARIABLE)), cores)
    try:
        found = Mechanism.of(groups).text
    finally:
        if groups is not None:
            groups.close()
    nodes = len(set(cores.values()))
    return Check("actions", "ok", f"{found}; {len(cores)} cores on {nodes} NUMA node{'s' * (nodes > 1)}")


def _model(asked: str | None) -> Check:
    """Whether the model is whole, and its memory beside what is free for it."""
    try:
        path = str(asked or shipped_model())
        check_model(path)
        name = f"{path}" if asked else f"tiny-agent at {path}"
        memory = model_memory(path)
    except BadInput as error:
        return Check("model", "fail" if asked else "warn", str(error))
    except OSError as error:  # of the path itself, such as a name that is too long
        return Check("model", "fail", f"{str(asked)[:100]}: {error.strerror}")
    needed = memory.weight_bytes + memory.workspace_bytes
    places = _free_memory()
    free = max(places.values())
    found = (
        f"{name}: {_gib(memory.weight_bytes)} of weights, {_gib(memory.workspace_bytes)} of workspace, "
        f"{1000 * memory.kv_token_bytes / 2**20:.0f} MiB of KV for 1,000 tokens; free: "
        + ", ".join(f"{place} {_gib(size)}" for place, size in places.items())
    )
    if needed > free:
        return Check("model", "warn", found, "free memory, or divide it by --tp-degree over several GPUs")
    return Check("model", "ok", found)


def _free_memory() -> dict[str, int]:
    """Free bytes of each place in which an engine of the default kind would have a model."""
    gpus = installed_gpus() if engine_kind(DEFAULT_KIND).uses_gpus() and CUDA_DEVICES.exists() else ()
    return {f"GPU {gpu.index}": (gpu.memory_mib - gpu.used_mib) << 20 for gpu in gpus or ()} or {
        "memory": int(psutil.virtual_memory().available)
    }


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


def _port() -> Check:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            with socket.create_connection(probe.getsockname(), timeout=5):
                return Check("loopback", "ok", "a free port answers")
    except OSError as error:
        return Check("loopback", "fail", f"no free port on 127.0.0.1 answers ({error.strerror or error})")


def _disk() -> Check:
    free_gib = shutil.disk_usage(Path.cwd()).free / _GIB
    found = f"{free_gib:.0f} GiB free in {Path.cwd()}"
    if free_gib < _LEAST_DISK_GIB:
        return Check("disk", "fail", found, f"free at least {_LEAST_DISK_GIB} GiB")
    return Check("disk", "ok", found)


def _memory() -> Check:
    free_gib = psutil.virtual_memory().available / _GIB
    found = f"{free_gib:.0f} GiB available"
    if free_gib < _LEAST_MEMORY_GIB:
        return Check("memory", "warn", found, f"an engine on a CPU takes about {_LEAST_MEMORY_GIB} GiB")
    return Check("memory", "ok", found)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"limit {soft} (hard {hard})"
    if soft != resource.RLIM_INFINITY and soft < _LEAST_OPEN_FILES:
        return Check("open files", "warn", found, f"run `ulimit -n {_LEAST_OPEN_FILES}` for many workers")
    return Check("open files", "ok", found)


def _dashboard() -> Check:
    version = _version("bokeh")
    if version is None:
        return Check("dashboard", "warn", "bokeh is not installed", "run `pip install bokeh`")
    return Check("dashboard", "ok", f"bokeh {version}")


def _slurm() -> Check:
    tools = [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name)]
    if not tools:
        return Check("slurm", "ok", "no tools found: not a SLURM cluster")
    if _version("dask-jobqueue") is None:
        return Check("slurm", "warn", f"{', '.join(tools)} found", "run `pip install dask-jobqueue`")
    return Check("slurm", "ok", f"{', '.join(tools)}, dask-jobqueue {_version('dask-jobqueue')}")


async def _scheduler(address: str) -> Check:
    # Imported here: these take seconds.
    from heddle_dask.cli.cluster_choice import CONNECT_TIMEOUT_S, remote_client
    from heddle_dask.live.wire.messages import ENGINE_RESOURCE, SLOT_RESOURCE, TOOL_RESOURCE

    try:
        async with remote_client(address, CONNECT_TIMEOUT_S) as client:
            scheduler: Any = client.scheduler
            identity = await scheduler.identity(n_workers=-1)
    except BadInput as error:
        return Check("scheduler", "fail", str(error))
    workers = [worker.get("resources", {}) for worker in identity["workers"].values()]
    tagged = {
        tag: sum(tag in resources for resources in workers) for tag in (ENGINE_RESOURCE, SLOT_RESOURCE, TOOL_RESOURCE)
    }
    found = f"{len(workers)} workers at {address}; tagged: " + ", ".join(f"{t} {n}" for t, n in tagged.items())
    missing = [tag for tag in (ENGINE_RESOURCE, TOOL_RESOURCE) if not tagged[tag]]
    if missing:
        needed = ", ".join(f"{tag}=1" for tag in missing)
        return Check("scheduler", "fail", found, f"start workers with --resources {needed}")
    return Check("scheduler", "ok", found)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
