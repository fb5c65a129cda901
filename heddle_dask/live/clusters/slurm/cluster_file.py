"""The cluster file: TOML with what all groups share at the top, and a table ``[groups.NAME]`` for each of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.toml_table import read_toml, unknown_key
from heddle_dask.live.clusters.quota_table import QUOTAS
from heddle_dask.live.clusters.slurm.amounts import memory_bytes_of, seconds_of
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan, Container, WorkerGroup, check_group_name

GROUPS = "groups"
AFFINITY = "affinity"
"""``affinity = {math = "H20", default = "H800"}``: of the run, as quotas are; ``heddle rollout`` reads it."""


def read_cluster_file(path: str | Path) -> ClusterPlan:
    """The plan in a TOML file; paths in it are relative to the file.

    Raises
    ------
    BadInput
        No TOML, an unknown key, or a value that cannot be; one line, with the file.
    """
    path = Path(path)
    return cluster_plan(read_toml(path, "cluster file"), f"cluster file {path}", path.absolute().parent)


def is_plan(content: Mapping[str, Any]) -> bool:
    """Whether the content of a TOML file is a plan of groups, well-formed or not, by its keys."""
    return not content.keys().isdisjoint(_plan_keys(Path()))


def cluster_plan(content: Mapping[str, Any], where: str = "cluster", directory: Path | None = None) -> ClusterPlan:
    """The plan in a mapping with the keys of a cluster file.

    Parameters
    ----------
    where
        What an error message begins with.
    directory
        To which paths are relative; None: the current one.

    Raises
    ------
    BadInput
    """
    try:
        # Quotas are of the run: `quota_table` reads them.
        own = {key: value for key, value in content.items() if key not in (QUOTAS, AFFINITY)}
        values = _values(own, _plan_keys(directory or Path.cwd()), "")
        groups = values.pop(GROUPS, {})
        return ClusterPlan(groups={name: _group(name, table) for name, table in groups.items()}, **values)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


@dataclass(frozen=True, slots=True)
class _Key:
    """A key of the file: the field that it sets, and what makes a value of it."""

    field: str
    read: Callable[[Any, str], Any]


def _values(content: object, keys: Mapping[str, _Key], prefix: str) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise BadInput(f"{prefix.rstrip('.')} is {content!r}: use a table")
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in keys:
            place = f"[{prefix.rstrip('.')}]" if prefix else "the file"
            raise unknown_key(key, list(keys), place)
        values[keys[key].field] = keys[key].read(value, prefix + key)
    return values


def _group(name: str, content: object) -> WorkerGroup:
    check_group_name(name)
    prefix = f"{GROUPS}.{name}."
    values = _values(content, _GROUP_KEYS, prefix)
    if "role" not in values:
        raise BadInput(
            f"[{GROUPS}.{name}] has no role: give role = 'rollout' for engines, 'tool' for actions, or 'trainer'"
        )
    given_zero = [
        key
        for key in ("engines", "tp-degree", "engines-per-gpu", "tool-cpus")
        if values.get(_GROUP_KEYS[key].field) == 0
    ]
    if given_zero:
        raise BadInput(f"{prefix}{given_zero[0]} is 0: use a whole number of at least 1, or leave it out")
    return WorkerGroup(name=name, **values)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadInput(f"{name} is {value!r}: use a text in quotes")
    return value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise BadInput(f"{name} is {value!r}: use a list of texts")
    return tuple(value)


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{name} is {value!r}: use a whole number")
    return value


def _number(value: Any, name: str) -> float:
    if not is_finite(value) or value <= 0:
        raise BadInput(f"{name} is {value!r}: use a number above 0")
    return float(value)


def _switch(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise BadInput(f"{name} is {value!r}: use true or false")
    return value


def _ports(value: Any, name: str) -> tuple[int, int]:
    first, _, last = value.partition(":") if isinstance(value, str) else ("", "", "")
    if not (first.isdecimal() and last.isdecimal()):
        raise BadInput(f"{name} is {value!r}: give FIRST:LAST, such as '40000:40100'")
    return int(first), int(last)


def _path(directory: Path, value: Any, name: str) -> Path:
    return Path(os.path.normpath(directory / Path(_text(value, name)).expanduser()))


def _variables(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise BadInput(f"{name} is {value!r}: use a table of variables")
    for variable, content in value.items():
        if not isinstance(content, str) and not is_finite(content):
            raise BadInput(f"{name}.{variable} is {content!r}: use a text in quotes")
    return {variable: str(content) for variable, content in value.items()}


def _container(value: Any, name: str) -> Container:
    values = _values(value, _CONTAINER_KEYS, f"{name}.")
    for key in ("runtime", "image"):
        if key not in values:
            raise BadInput(f"[{name}] has no {key}: give runtime = 'apptainer' or 'pyxis', and image")
    try:
        return Container(**values)
    except BadInput as error:
        raise BadInput(f"[{name}] {error}") from None


def _plan_keys(directory: Path) -> dict[str, _Key]:
    path = partial(_path, directory)
    return {
        "backend": _Key("backend", _text),
        "interface": _Key("interface", _text),
        "host": _Key("host", _text),
        "worker-ports": _Key("worker_ports", _ports),
        "scheduler-port": _Key("scheduler_port", _whole),
        "scratch": _Key("scratch", _text),
        "caches": _Key("caches", _text),
        "stage-weights": _Key("stage_weights", _switch),
        "shared": _Key("shared", path),
        "logs": _Key("logs", path),
        "python": _Key("python", _text),
        "tls": _Key("tls", _switch),
        "offline": _Key("offline", _switch),
        "adaptive": _Key("adaptive", _switch),
        "export": _Key("export", _text),
        "poll": _Key("poll_s", seconds_of),
        "dashboard-address": _Key("dashboard_address", _text),
        GROUPS: _Key(GROUPS, _tables),
    }


def _tables(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInput(f"{name} is {value!r}: give tables [groups.NAME]")
    return value


_CONTAINER_KEYS = {
    "runtime": _Key("runtime", _text),
    "image": _Key("image", _text),
    "binds": _Key("binds", _texts),
    "options": _Key("options", _texts),
    "python": _Key("python", _text),
}
_GROUP_KEYS = {
    "role": _Key("role", _text),
    "partition": _Key("partition", _text),
    "account": _Key("account", _text),
    "qos": _Key("qos", _text),
    "reservation": _Key("reservation", _text),
    "gres": _Key("gres", _text),
    "constraint": _Key("constraint", _text),
    "cpus": _Key("cpus", _whole),
    "memory": _Key("memory_bytes", memory_bytes_of),
    "walltime": _Key("walltime_s", seconds_of),
    "engines": _Key("engines", _whole),
    "tp-degree": _Key("tp_degree", _whole),
    "engines-per-gpu": _Key("engines_per_gpu", _whole),
    "gpu-memory-utilization": _Key("gpu_memory_utilization", _number),
    "kv-cache-gib": _Key("kv_cache_gib", _number),
    "tool-cpus": _Key("tool_cpus", _whole),
    "minimum": _Key("minimum", _whole),
    "maximum": _Key("maximum", _whole),
    "initial": _Key("initial", _whole),
    "prologue": _Key("prologue", _texts),
    "directives": _Key("directives", _texts),
    "container": _Key("container", _container),
    "start-timeout": _Key("start_timeout_s", seconds_of),
    "drain": _Key("drain_s", seconds_of),
    "env": _Key("env", _variables),
    "hardware": _Key("hardware", _text),
}
