"""Engine costs from a shipped profile, from shapes of model and GPU, from a measured table, or from explicit terms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from typing import Any

from heddle_dask.core.errors import BadInput, check_keys
from heddle_dask.cost.hardware import Gpu, ModelShape, iteration_terms, kv_capacity_tokens
from heddle_dask.cost.iteration import EngineCost, fixed_cost
from heddle_dask.cost.measured import MeasuredTable
from heddle_dask.cost.published import gpu_of, model_of
from heddle_dask.cost.table_fit import fit_table

__all__ = [
    "EngineCost",
    "cost_from_mapping",
    "engine_cost_for",
    "fixed_cost",
    "hardware_cost",
    "load_profile",
    "profile_names",
]


def profile_names() -> list[str]:
    folder = resources.files("heddle_dask.cost") / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_profile(name: str, tp_degree: int = 1) -> EngineCost:
    """The cost of a shipped profile at a TP degree."""
    if name not in profile_names():
        raise BadInput(f"cost profile {name!r} is unknown: use {', '.join(profile_names())}")
    path = resources.files("heddle_dask.cost") / "profiles" / f"{name}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content.pop("source")
    return cost_from_mapping(content, tp_degree)


def engine_cost_for(
    model: str | ModelShape, gpu: str | Gpu, tp_degree: int = 1, *, table: MeasuredTable | None = None
) -> EngineCost:
    """The cost of a model on `tp_degree` GPUs; a measured table of this model and degree overrides the formula.

    Parameters
    ----------
    model
        A published name (`heddle_dask.cost.published.model_names`), a directory with a config.json, or a shape.
    gpu
        A published name (`heddle_dask.cost.published.gpu_names`) or a shape.
    table
        The fitted cost of this table is returned instead. If the table has no KV capacity, the formula gives it.
    """
    shape = model_of(model) if isinstance(model, str) else model
    chip = gpu_of(gpu) if isinstance(gpu, str) else gpu
    if table is None:
        return hardware_cost(shape, chip, tp_degree)
    table.check(shape, tp_degree)
    capacity = None if table.capacity_tokens else kv_capacity_tokens(shape, chip, tp_degree)
    return fit_table(table, capacity).cost


def cost_from_mapping(mapping: Mapping[str, Any], tp_degree: int = 1) -> EngineCost:
    """Read a cost from parsed JSON or TOML. Five forms:

    - ``{"profile": NAME}``: a shipped profile, at `tp_degree`;
    - ``{"seconds_per_token": S}``: `fixed_cost`;
    - ``{"model": NAME | DIR | {...}, "gpu": NAME | {...}}``: from the shapes of model and GPU, at `tp_degree`;
    - ``{"table": NAME | FILE}``: a measured table (`heddle_dask.cost.measured`), which must be of `tp_degree`;
    - the terms themselves (`EngineCost`'s attributes; they hold for one degree only).
    """
    if "profile" in mapping:
        check_keys("engine cost", mapping, ("profile",))
        return load_profile(str(mapping["profile"]), tp_degree)
    if "seconds_per_token" in mapping:
        check_keys("engine cost", mapping, ("seconds_per_token",))
        return fixed_cost(mapping["seconds_per_token"])
    if "table" in mapping:
        check_keys("engine cost", mapping, ("table",))
        table = MeasuredTable.load(str(mapping["table"]))
        table.check(table.shape, tp_degree)
        return fit_table(table).cost
    if "model" in mapping or "gpu" in mapping:
        check_keys("engine cost", mapping, ("model", "gpu"))
        model, gpu = mapping.get("model", {}), mapping.get("gpu", {})
        return hardware_cost(
            model_of(model) if isinstance(model, str) else ModelShape.from_mapping(model),
            gpu_of(gpu) if isinstance(gpu, str) else Gpu.from_mapping(gpu),
            tp_degree,
        )
    check_keys("engine cost", mapping, tuple(field.name for field in fields(EngineCost)))
    if "fixed_s" not in mapping:
        raise BadInput("engine cost lacks fixed_s: give it, or profile, seconds_per_token, table, or model and gpu")
    return EngineCost(**mapping)


def hardware_cost(model: ModelShape, gpu: Gpu, tp_degree: int = 1) -> EngineCost:
    """The cost of `model` on `tp_degree` GPUs, by the formula of `heddle_dask.cost.hardware`."""
    terms = iteration_terms(model, gpu, tp_degree)
    return EngineCost(capacity_tokens=kv_capacity_tokens(model, gpu, tp_degree), **terms)  # type: ignore[arg-type]


class ClassCosts(dict[int, EngineCost]):
    """Costs by TP degree, as one class of hardware has them, and those of every class beside them.

    Parameters
    ----------
    by_class
        Costs by class of hardware and TP degree. As a mapping by degree alone, this is that of the first class with the
        degree.
    """

    def __init__(self, by_class: Mapping[tuple[str, int], EngineCost]) -> None:
        super().__init__()
        self.by_class = dict(by_class)
        for (_, degree), cost in by_class.items():
            self.setdefault(degree, cost)

    def of(self, hardware: str, tp_degree: int) -> EngineCost | None:
        """The cost of an engine of that class and degree; None: unknown."""
        return self.by_class.get((hardware, tp_degree))
