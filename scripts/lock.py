"""Writes requirements-lock.txt and constraints-gpu.txt: what pip installs, each archive with its SHA-256.

The versions of the first are those of constraints.txt. Run it in the project's environment with `uv` on the path,
after a change of constraints.txt or of the requirements in pyproject.toml; it asks the package index for metadata only.

    .venv/bin/python scripts/lock.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import requires
from itertools import product
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
EXTRAS = ("bench", "cpu", "train", "track", "trl", "slurm", "dashboard", "otel", "docs", "dev")
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")

# Requirements of the packages that are left out, and why.
LEFT_OUT = {
    "torch": "scripts/install.sh installs it first, from PyTorch's own index",
    "torchvision": "its build on PyPI does not fit the CPU build of torch: models could not be imported",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "triton": "compiles kernels for GPUs; xgrammar asks for it on every Linux",
    "nvidia-nccl-cu12": "connects GPUs; xgboost asks for it on aarch64, where it has no CPU build",
    "kopf": "dask-kubernetes asks for it; a test reads only the CRDs in its wheel",
    "kr8s": "as kopf",
    "kubernetes": "as kopf",
    "kubernetes-asyncio": "as kopf",
    "pykube-ng": "as kopf",
}
# uv reads the metadata of one wheel of a version; the wheel for Linux asks for more.
ONLY_ON_LINUX = ("intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64'",)

LOCK_HEADER = """\
# The versions of constraints.txt with the SHA-256 of every archive on PyPI: Linux on x86-64 and aarch64,
# Python 3.11 to 3.13. Written by scripts/lock.py, installed by scripts/install.sh (`pip install --no-deps -r`).
"""
GPU_HEADER = """\
# Versions for rollout workers with GPUs: pip install -c constraints-gpu.txt '.[gpu]'. Written by scripts/lock.py.
# Resolved from the metadata on PyPI, for Linux on x86-64 and aarch64, Python 3.11 to 3.13.
"""


def compiled(*arguments: str) -> str:
    """What `uv pip compile` prints for the environments of pyproject.toml, one block of lines for each package."""
    command = (
        "uv",
        "pip",
        "compile",
        "--universal",
        "--python-version",
        PYTHONS[0],
        "--quiet",
        "--no-header",
    )
    done = subprocess.run(
        (*command, "--no-annotate", "pyproject.toml", *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def everywhere(marker: Marker) -> bool:
    """Whether a marker holds on each platform that the lock serves."""
    return all(
        marker.evaluate(
            {
                "implementation_name": "cpython",
                "platform_machine": machine,
                "platform_python_implementation": "CPython",
                "platform_system": "Linux",
                "python_full_version": f"{python}.0",
                "python_version": python,
                "sys_platform": "linux",
            }
        )
        for python, machine in product(PYTHONS, MACHINES)
    )


def without_idle_markers(lines: str) -> str:
    """The lines without the markers that hold wherever the lock is used."""
    kept = []
    for line in lines.splitlines():
        requirement, separator, rest = line.partition(" ; ")
        condition = rest.removesuffix(" \\")
        if separator and everywhere(Marker(condition)):
            line = requirement + rest.removeprefix(condition)
        kept.append(line)
    return "\n".join(kept) + "\n"


def torch_requirements() -> list[str]:
    """What the installed CPU build of torch asks for: PyPI's build of that version asks for CUDA as well."""
    wanted = [Requirement(line) for line in requires("torch") or ()]
    return [str(r) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]


def write_lock(scratch: Path) -> None:
    overrides, inputs = scratch / "overrides.txt", scratch / "inputs.in"
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in LEFT_OUT), encoding="utf-8")
    inputs.write_text("\n".join([*torch_requirements(), *ONLY_ON_LINUX]) + "\n", encoding="utf-8")
    extras = [argument for extra in EXTRAS for argument in ("--extra", extra)]
    constrained = ("--constraint", "constraints.txt", "--override", str(overrides))
    lines = compiled(str(inputs), *extras, *constrained, "--generate-hashes")
    (ROOT / "requirements-lock.txt").write_text(LOCK_HEADER + without_idle_markers(lines), encoding="utf-8")


def write_gpu_constraints(scratch: Path) -> None:
    """Where vLLM for GPUs allows it, the versions are those of constraints.txt: uv keeps what its output file says."""
    output = scratch / "constraints-gpu.txt"
    output.write_text((ROOT / "constraints.txt").read_text(encoding="utf-8"), encoding="utf-8")
    extras = ("--extra", "gpu", "--extra", "slurm", "--extra", "dashboard")
    compiled(*extras, "--output-file", str(output))
    lines = output.read_text(encoding="utf-8")
    (ROOT / "constraints-gpu.txt").write_text(GPU_HEADER + without_idle_markers(lines), encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_lock(Path(folder))
        write_gpu_constraints(Path(folder))
