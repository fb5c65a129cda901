"""What this process may use of its machine: cores by NUMA node, and memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_MEMINFO = Path("/proc/meminfo")


def own_cores(nodes_folder: Path = _NODES) -> dict[int, int]:
    """The cores on which this process may run (its affinity, which follows its cpuset), with their NUMA nodes."""
    nodes = numa_nodes(nodes_folder)
    return {core: nodes.get(core, 0) for core in sorted(os.sched_getaffinity(0))}


def numa_nodes(folder: Path = _NODES) -> dict[int, int]:
    """The NUMA node of each core, as the kernel lists them; empty where it lists none."""
    nodes: dict[int, int] = {}
    for place in sorted(folder.glob("node[0-9]*")):
        try:
            cores = parsed_list((place / "cpulist").read_text(encoding="ascii"))
        except OSError:
            continue
        nodes |= dict.fromkeys(cores, int(place.name.removeprefix("node")))
    return nodes


def parsed_list(text: str) -> list[int]:
    """The numbers of a list of the kernel: ``0-3,8``."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def memory_bytes(cgroup_folders: Mapping[str, Path]) -> int:
    """Memory of this machine in bytes, or of the control group of this process where that is less.

    Parameters
    ----------
    cgroup_folders
        Folder of the group of this process by controller, as `cgroups.find_cgroups` returns them.
    """
    total = 0
    for line in _MEMINFO.read_text(encoding="ascii").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    folder = cgroup_folders.get("memory")
    while folder is not None and folder != folder.parent:
        limits = [_limit(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
        total = min([total, *(limit for limit in limits if limit is not None)])
        # A group is held to the limits of all above it.
        folder = folder.parent if (folder.parent / "cgroup.procs").exists() else None
    return total


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
