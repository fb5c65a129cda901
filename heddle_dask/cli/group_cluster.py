"""A rollout on a cluster of worker groups: the cluster file of ``--cluster``, and what it excludes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed import Client

from heddle_dask.cli.cluster_choice import cluster_client
from heddle_dask.cli.engine_option import parsed_vllm_options
from heddle_dask.core.errors import BadInput
from heddle_dask.core.toml_table import read_toml
from heddle_dask.live.clusters.slurm.cluster import SlurmCluster
from heddle_dask.live.clusters.slurm.cluster_file import cluster_plan, is_plan
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan
from heddle_dask.live.driver.options import Engines
from heddle_dask.live.driver.session.tp_degree_specs import TpDegreeSpecs

_SAID_BY_GROUPS = {
    "engines": "each group's engines, minimum and maximum",
    "tool_workers": "each group's minimum and maximum",
    "tool_cpus": "each group's tool-cpus",
    "tp_degrees": "each group's tp-degree",
    "engines_per_gpu": "each group's engines-per-gpu",
}
_OF_ENGINES = {
    "tp_degree": "TP degree",
    "engines_per_gpu": "number of engines on a GPU",
    "gpu_memory_utilization": "share of a GPU's memory",
    "kv_cache_gib": "size of KV cache",
}


def plan_of_file(path: Path | None) -> ClusterPlan | None:
    """The plan in a file of ``--cluster``; None: the file describes one cluster on this machine, without groups."""
    content = {} if path is None else read_toml(path, "--cluster")
    if path is None or not is_plan(content):
        return None
    return cluster_plan(content, f"--cluster {path}", path.absolute().parent)


def check_plan(plan: ClusterPlan, path: Path, given: frozenset[str]) -> None:
    """Refuse a plan on which no rollout can run, and options that the groups decide.

    Parameters
    ----------
    given
        Names of the options given on the command line.
    """
    for name, key in _SAID_BY_GROUPS.items():
        if name in given:
            option = "--tp" if name == "tp_degrees" else f"--{name.replace('_', '-')}"
            raise BadInput(f"{option} has no effect on the groups of --cluster {path}: set {key} there")
    roles = {group.role for group in plan.groups.values()}
    for role, needs in (("rollout", "engines"), ("tool", "tool calls and rewards")):
        if role not in roles:
            raise BadInput(
                f"--cluster {path}: no group has role = {role!r}, and a rollout needs workers for {needs}: add one"
            )
    for field in _OF_ENGINES:
        _of_all_groups(plan, field)


def _of_all_groups(plan: ClusterPlan, field: str) -> Any:
    """What all groups with engines say of them; all engines of a rollout are alike."""
    by_value = {getattr(group, field): group.name for group in plan.groups.values() if group.role == "rollout"}
    if len(by_value) > 1:
        told = ", ".join(f"{name} has {value}" for value, name in by_value.items())
        key = field.replace("_", "-")
        raise BadInput(f"engines of a rollout have one {_OF_ENGINES[field]} ({told}): use the same {key} in all groups")
    return next(iter(by_value))


def engines_of_groups(engines: Engines, plan: ClusterPlan, model: str, tokens: int | None, seed: int) -> Engines:
    """The engines of the command line at the TP degree of the groups, with their parts of the GPUs."""
    degree, per_gpu = _of_all_groups(plan, "tp_degree"), _of_all_groups(plan, "engines_per_gpu")
    memory = {name: _of_all_groups(plan, name) for name in ("gpu_memory_utilization", "kv_cache_gib")}
    memory = {name: value for name, value in memory.items() if value is not None}
    if memory:
        asked = {**memory, "engine_args": ()}
        engines = replace(engines, options=parsed_vllm_options(engines.kind, asked, engines.options))
    if per_gpu > 1:
        engines = replace(engines, engines_per_gpu=per_gpu)
    if degree == 1:
        return engines
    spec = engines.spec_for(model, tokens, seed)
    # The slots are those of one engine, whatever its degree.
    split = replace(TpDegreeSpecs(spec, engines.cost).at(degree), slots=spec.slots)
    return Engines(spec=split, count=engines.count, cost=engines.cost, patience=engines.patience)


@contextlib.asynccontextmanager
async def groups_client(plan: ClusterPlan, logs: Path, on_event: Callable[[str], None]) -> AsyncIterator[Client]:
    """A client of a new cluster of groups; `on_event` takes a line for what becomes of each job."""
    cluster = SlurmCluster(plan, logs=logs, on_event=on_event, asynchronous=True)
    async with cluster_client(cluster, logs) as client:
        yield client
