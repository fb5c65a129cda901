"""`task.toml` of a task of Harbor: what it asks for, and what cannot be given here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.toml_table import read_toml

TASK_FILE = "task.toml"
_MIB = 1 << 20
_TEMPLATE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}


@dataclass(frozen=True)
class HarborFile:
    """What is read of it; variables are as they stand there.

    Attributes
    ----------
    agent_s, verifier_s
        Limits of time.
    cpus
        For the tests; 0: it says nothing.
    memory_bytes, disk_bytes
        Of the sandbox; 0: it says nothing.
    refused
        Why it cannot be run here; empty: it can.
    """

    folder: Path
    agent_s: float | None
    verifier_s: float
    image: str
    directory: str
    category: str
    cpus: int
    memory_bytes: int
    disk_bytes: int
    refused: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    verifier_variables: Mapping[str, str] = field(default_factory=dict)
    solution_variables: Mapping[str, str] = field(default_factory=dict)
    health: Mapping[str, Any] = field(default_factory=dict)


def read_harbor_file(folder: Path) -> HarborFile:
    """Read the file of one task.

    Raises
    ------
    BadInput
        It is no TOML, or a value is of the wrong kind.
    """
    path = folder / TASK_FILE
    found = read_toml(path, "task")
    parts = {name: found.get(name) or {} for name in ("agent", "verifier", "environment", "metadata", "solution")}
    if not all(isinstance(part, Mapping) for part in parts.values()):
        raise BadInput(f"task {path}: agent, verifier, environment, metadata and solution are tables")
    agent, verifier, environment = parts["agent"], parts["verifier"], parts["environment"]
    return HarborFile(
        folder=folder,
        agent_s=_seconds(agent, path) if "timeout_sec" in agent else None,
        verifier_s=_seconds(verifier, path) if "timeout_sec" in verifier else 600.0,
        image=str(environment.get("docker_image") or ""),
        directory=str(environment.get("workdir") or ""),
        category=str(parts["metadata"].get("category") or ""),
        cpus=max(1, round(environment["cpus"])) if environment.get("cpus") else 0,
        memory_bytes=_mib(environment, "memory", path),
        disk_bytes=_mib(environment, "storage", path),
        refused=_refused(found, parts, folder),
        variables=_variables(environment, path),
        verifier_variables=_variables(verifier, path),
        solution_variables=_variables(parts["solution"], path),
        health=environment.get("healthcheck") or {},
    )


def resolved(variables: Mapping[str, str], where: str) -> dict[str, str]:
    """Variables with ``${NAME}`` and ``${NAME:-default}`` replaced by those of this process.

    Raises
    ------
    BadInput
        One has neither a value here nor a default.
    """
    made: dict[str, str] = {}
    for name, value in variables.items():
        template = _TEMPLATE.fullmatch(value)
        if template is None:
            made[name] = value
            continue
        here = os.environ.get(template[1], template[2])
        if here is None:
            raise BadInput(f"{where}: the variable {name} is ${{{template[1]}}}, which is not set here: export it")
        made[name] = here
    return made


def _refused(found: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """What the task asks for that there is not."""
    verifier, environment = parts["verifier"], parts["environment"]
    asked = {
        "has several steps": found.get("steps"),
        "has services (docker-compose.yaml)": (folder / "environment" / "docker-compose.yaml").exists(),
        "is for Windows": str(environment.get("os", "linux")).lower() != "linux",
        "needs GPUs": environment.get("gpus"),
        "needs a TPU": environment.get("tpu"),
        "has MCP servers": environment.get("mcp_servers"),
        "is verified in an environment of its own": verifier.get("environment")
        or verifier.get("environment_mode") == "separate",
        "has users of its own": {parts["agent"].get("user"), verifier.get("user")} - {None, "root", 0},
        "has no instruction.md": not (folder / "instruction.md").is_file(),
        "has no tests/test.sh": not (folder / "tests" / "test.sh").is_file(),
    }
    return next((f"it {what}" for what, wanted in asked.items() if wanted), "")


def _seconds(table: Mapping[str, Any], path: Path) -> float:
    value = table["timeout_sec"]
    if not (is_finite(value) and value > 0):
        raise BadInput(f"task {path}: timeout_sec is {value!r}: use seconds above 0")
    return float(value)


def _mib(table: Mapping[str, Any], name: str, path: Path) -> int:
    """Bytes of ``memory_mb = 2048``, or in the older form ``memory = "2G"``."""
    value = table.get(f"{name}_mb") or table.get(name) or 0
    try:
        text = str(value).strip().upper().removesuffix("B")
        amount = float(text[:-1]) * _SIZES[text[-1]] if text[-1:] in _SIZES else float(text)
    except ValueError:
        raise BadInput(f"task {path}: {name} is {value!r}: use MB, or a text such as 2G") from None
    return int(amount * _MIB)


def _variables(table: Mapping[str, Any], path: Path) -> dict[str, str]:
    found = table.get("env") or {}
    if not isinstance(found, Mapping):
        raise BadInput(f"task {path}: env is {found!r}: use a table of texts")
    return {str(name): str(value) for name, value in found.items()}
