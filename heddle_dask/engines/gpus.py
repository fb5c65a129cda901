"""The GPUs of this machine: those that a process may use, and those that ``nvidia-smi`` finds."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# A node has at most so many GPUs. Taken for its number where nvidia-smi is absent; CUDA then refuses those that are not
# there.
_MOST_GPUS = 16
_QUERY = ("nvidia-smi", "--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader,nounits")
_ANSWER_S = 20.0
CUDA_DEVICES = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    """One GPU, as ``nvidia-smi`` describes it; memory in MiB, 0 where it states none."""

    index: str
    name: str
    memory_mib: int
    used_mib: int


def installed_gpus() -> tuple[InstalledGpu, ...] | None:
    """The GPUs that ``nvidia-smi`` finds; None where it is not installed or does not answer."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parsed_gpus(done.stdout)


def parsed_gpus(text: str) -> tuple[InstalledGpu, ...]:
    """The GPUs in an answer of ``nvidia-smi``: one line each, with index, name, total and used memory."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return tuple(
        InstalledGpu(row[0], row[1], *(int(part) if part.isdigit() else 0 for part in row[2:]))
        for row in rows
        if len(row) == 4
    )


def named_gpus(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names; None where it is not set."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def usable_gpus(
    environ: Mapping[str, str],
    installed: Callable[[], tuple[InstalledGpu, ...] | None] = installed_gpus,
) -> tuple[str, ...]:
    """The GPUs that engines of this process may take, by name.

    Those of ``CUDA_VISIBLE_DEVICES``, which wins; else those that ``nvidia-smi`` finds; else 16 numbers.
    """
    named = named_gpus(environ)
    if named is not None:
        return named
    found = installed()
    return tuple(map(str, range(_MOST_GPUS))) if found is None else tuple(gpu.index for gpu in found)


def present_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs of a process that also runs without one: as `usable_gpus`, none where this machine has no driver."""
    return () if named_gpus(environ) is None and not CUDA_DEVICES.exists() else usable_gpus(environ)
