"""The memory of a job of a batch system on this node, as its environment says."""

from __future__ import annotations

from collections.abc import Mapping

_MIB = 1 << 20


def job_memory_bytes(environ: Mapping[str, str]) -> int:
    """Bytes of ``--mem`` or ``--mem-per-cpu`` as SLURM passes them on (in mebibytes); 0: nothing tells, or no limit."""
    per_node = _number(environ.get("SLURM_MEM_PER_NODE", ""))
    per_cpu = _number(environ.get("SLURM_MEM_PER_CPU", ""))
    return (per_node or per_cpu * _number(environ.get("SLURM_CPUS_ON_NODE", ""))) * _MIB


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
