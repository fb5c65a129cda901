"""Published figures of GPUs and models by name; ``constants/*.json`` gives each with its source."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import Gpu, ModelShape
from heddle_dask.cost.model_config import read_config, shape_of_config


def gpu_names() -> list[str]:
    """Names that `gpu_of` accepts."""
    return sorted(_constants("gpus"))


def gpu_of(name: str) -> Gpu:
    """The published figures of a GPU; the name is case-insensitive."""
    known = _constants("gpus")
    if name.lower() not in known:
        raise BadInput(f"GPU {name!r} is unknown: use {', '.join(sorted(known))}")
    return Gpu.from_mapping(known[name.lower()]["gpu"])


def gpu_called(name: str) -> Gpu | None:
    """The published figures of the GPU that ``nvidia-smi`` calls so; None: not one of them, such as a PCIe card."""
    # Drivers of before 2021 leave the maker's name out.
    asked = name.lower().removeprefix("nvidia ")
    for each in _constants("gpus").values():
        if each["called"].lower().removeprefix("nvidia ") == asked:
            return Gpu.from_mapping(each["gpu"])
    return None


def model_of(name_or_directory: str) -> ModelShape:
    """The shape of a published model (case-insensitive name), or of the model in a directory."""
    return shape_of_config(config_of(name_or_directory), name_or_directory)


def config_of(name_or_directory: str) -> dict[str, Any]:
    """The parsed config.json of a published model (the keys used here), or of the model in a directory."""
    known = _constants("models")
    name = name_or_directory.lower()
    if name in known:
        config: dict[str, Any] = known[name]["config"]
        return config
    if Path(name_or_directory).is_dir():
        return read_config(name_or_directory)
    raise BadInput(
        f"model {name_or_directory!r} is unknown: use {', '.join(sorted(known))} or a directory with a config.json"
    )


def _constants(kind: str) -> dict[str, dict[str, Any]]:
    path = resources.files("heddle_dask.cost") / "constants" / f"{kind}.json"
    content: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return content
