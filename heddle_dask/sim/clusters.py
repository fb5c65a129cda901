"""GPU clusters by name or from a TOML file, and the fleet of engines for a model on a cluster."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.core.toml_table import read_toml
from heddle_dask.cost.engine_cost import EngineCost, engine_cost_for
from heddle_dask.cost.hardware import MEMORY_SHARE, SETUP_S, Gpu, ModelShape, transfer_s
from heddle_dask.cost.measured import MeasuredTable, table_names
from heddle_dask.cost.published import gpu_of, model_of
from heddle_dask.cost.table_fit import fit_table
from heddle_dask.sim.fleet import ControlDelays, SimulatedFaults, SimulatedFleet, SimulatedLink, equal_engines

SLOTS_PER_GPU = 100
"""6,400 trajectories on 64 GPUs, as in Heddle's evaluation."""
STEP_ADDED_S = 0.014
ACTION_ADDED_S = 0.010
"""Control-plane seconds of a step and of a tool call: medians of ``python -m benchmarks overhead`` with 50 trajectories
on two shared cores in a busy hour of 2026-11-21 (experiments.md, step latency); a quiet hour gave 10.3 and 7.4 ms
(``benchmarks/overhead.json``). The stored tables use these values; the file of a cluster may override them."""


@dataclass(frozen=True, slots=True)
class HardwarePool:
    """GPUs of one class in a cluster of several.

    Attributes
    ----------
    gpu
        A published name.
    slots
        Slots of each engine; 0: `SLOTS_PER_GPU` for each of its GPUs.
    """

    hardware: str
    gpus: int
    gpu: str
    tp: int = 1
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Identical GPUs in nodes, or `pools` of them. The fields are the keys of a TOML file, with dashes.

    Attributes
    ----------
    gpu
        A published name.
    tp
        One TP degree for all engines, or the degree of each engine.
    slots
        Slots of each engine; 0: `SLOTS_PER_GPU` for each of its GPUs.
    memory_share
        Share of each GPU's memory that an engine has.
    tool_cpus
        CPUs of the tool pool; 0: tools take none, and all run at once.
    step_added_s, action_added_s
        Seconds that the control plane adds to an LLM step and to a tool call.
    tables
        Names or files of measured tables, in place of the cost formula. Engines then have only the degrees of the
        tables.
    believed_gpu
        A published name: strategies plan with the cost formula of that GPU. Empty: with the true cost.
    pools
        GPUs of several classes (``[[pools]]``), each with its own cost by the formula; `gpu`, `tp` and `slots` then
        mean nothing, and `gpus` is their sum.
    """

    gpus: int
    gpu: str = "h100"
    gpus_per_node: int = 8
    tp: int | tuple[int, ...] = 1
    slots: int = 0
    memory_share: float = MEMORY_SHARE
    tool_cpus: int = 0
    step_added_s: float = STEP_ADDED_S
    action_added_s: float = ACTION_ADDED_S
    kv_transfer: bool = True
    tables: tuple[str, ...] = ()
    believed_gpu: str = ""
    faults: SimulatedFaults = field(default_factory=SimulatedFaults)
    pools: tuple[HardwarePool, ...] = ()

    def __post_init__(self) -> None:
        if self.pools and self.gpus != (total := sum(pool.gpus for pool in self.pools)):
            raise BadInput(f"cluster has {self.gpus} GPUs and its pools {total}: leave gpus out")
        if self.pools and (self.tables or self.believed_gpu):
            raise BadInput("a cluster with pools takes neither tables nor a believed-gpu: leave them out")

    @property
    def hardware(self) -> tuple[str, ...]:
        """The classes of its pools, each once."""
        return tuple(dict.fromkeys(pool.hardware for pool in self.pools))

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        degrees = (self.tp,) * (self.gpus // self.tp) if isinstance(self.tp, int) else self.tp
        for degree in dict.fromkeys((self.tp,) if isinstance(self.tp, int) else self.tp):
            if self.gpus_per_node % degree:
                raise BadInput(f"TP degree {degree} does not divide a node of {self.gpus_per_node} GPUs")
        if not degrees or sum(degrees) > self.gpus:
            wanted = sum(degrees) or self.tp
            raise BadInput(f"engines of {wanted} GPUs on a cluster of {self.gpus}: use fewer or smaller ones")
        return degrees

    def fleet(self, model: str | ModelShape, *, max_context_tokens: int) -> SimulatedFleet:
        """Engines of this model on these GPUs."""
        shape = model_of(model) if isinstance(model, str) else model
        if self.pools:
            return self._mixed_fleet(shape, max_context_tokens)
        chip = gpu_of(self.gpu)
        chip = replace(chip, memory_bytes=chip.memory_bytes * self.memory_share / MEMORY_SHARE)
        degrees = self.tp_degrees
        tables = self._measured(shape, degrees)
        costs = {
            degree: engine_cost_for(shape, chip, degree, table=tables.get(degree)) for degree in dict.fromkeys(degrees)
        }
        engines: list[tuple[EngineDescription, EngineCost]] = []
        for number, degree in enumerate(degrees):
            engines += equal_engines(
                1,
                costs[degree],
                slots=self.slots or SLOTS_PER_GPU * degree,
                max_context_tokens=max_context_tokens,
                tp_degree=degree,
                kv_transfer=self.kv_transfer,
                first=number,
            )
        return SimulatedFleet(
            tuple(engines),
            delays=self._delays(tables, degrees),
            link=self._link(shape, chip, tables, degrees),
            faults=self.faults,
            tool_cpus=self.tool_cpus,
            believed=self._believed(shape, costs),
        )

    def _mixed_fleet(self, shape: ModelShape, max_context_tokens: int) -> SimulatedFleet:
        """Engines of every pool, class by class; KV caches travel over the slowest link between two of them."""
        engines: list[tuple[EngineDescription, EngineCost]] = []
        links: list[SimulatedLink] = []
        for pool in self.pools:
            degrees = replace(self, gpus=pool.gpus, tp=pool.tp, pools=()).tp_degrees
            chip = gpu_of(pool.gpu)
            engines += equal_engines(
                len(degrees),
                engine_cost_for(shape, chip, pool.tp),
                slots=pool.slots or SLOTS_PER_GPU * pool.tp,
                max_context_tokens=max_context_tokens,
                tp_degree=pool.tp,
                kv_transfer=self.kv_transfer,
                first=len(engines),
                hardware=pool.hardware,
            )
            links.append(self._link(shape, chip, {}, degrees))
        delays = ControlDelays.measured(self.step_added_s, self.action_added_s)
        slowest = max(links, key=lambda link: link.token_s)
        return SimulatedFleet(tuple(engines), delays=delays, link=slowest, faults=self.faults, tool_cpus=self.tool_cpus)

    def conditions(self) -> dict[str, object]:
        """Measured tables, assumed GPU and faults, for the conditions that a simulation prints; empty without any."""
        found: dict[str, object] = {}
        if self.pools:
            found["pools"] = " + ".join(f"{pool.gpus} {pool.hardware} (TP{pool.tp})" for pool in self.pools)
        if self.tables:
            found["tables"] = " ".join(self.tables)
        if self.believed_gpu:
            found["believed gpu"] = self.believed_gpu
        values = {name: getattr(self.faults, name) for name in FAULTS}
        faults = [f"{name.replace('_', '-')} {value:g}" for name, value in values.items() if value]
        if faults:
            found["faults"] = " ".join(faults)
        return found

    def _delays(self, tables: Mapping[int, MeasuredTable], degrees: Sequence[int]) -> ControlDelays:
        delays = ControlDelays.measured(self.step_added_s, self.action_added_s)
        ways_s = [fit_table(tables[degree]).request_s for degree in dict.fromkeys(degrees) if degree in tables]
        return delays.with_request(max(ways_s, default=0.0))

    def _measured(self, shape: ModelShape, degrees: Sequence[int]) -> Mapping[int, MeasuredTable]:
        """Tables by TP degree; refuses tables of another model, two tables of one degree, and a missing degree."""
        found: dict[int, MeasuredTable] = {}
        for name in self.tables:
            table = MeasuredTable.load(name)
            table.check(shape, table.degree)
            if table.degree in found:
                raise BadInput(f"{table.where} is the second of TP degree {table.degree}: give one a degree")
            found[table.degree] = table
        # Measured and computed costs in one fleet would compare the sources of the figures, not the engines.
        lacking = [degree for degree in degrees if found and degree not in found]
        if lacking:
            raise BadInput(
                f"none of the measured tables is of TP degree {lacking[0]}: measure it with `heddle profile`, or use "
                f"{', '.join(map(str, sorted(found)))}"
            )
        return found

    def _believed(self, shape: ModelShape, degrees: Iterable[int]) -> Mapping[int, EngineCost]:
        if not self.believed_gpu:
            return {}
        believed = gpu_of(self.believed_gpu)
        return {degree: engine_cost_for(shape, believed, degree) for degree in degrees}

    def _link(
        self, shape: ModelShape, chip: Gpu, tables: Mapping[int, MeasuredTable], degrees: Sequence[int]
    ) -> SimulatedLink:
        """The slowest link between two engines: across nodes where there are several, at the least TP degree.

        Taken from the table of that degree if it has transfer times.
        """
        degree = min(degrees)
        measured = fit_table(tables[degree]) if degree in tables else None
        if measured is not None and measured.kv_setup_s is not None:
            return SimulatedLink(setup_s=measured.kv_setup_s, token_s=measured.kv_token_s or 0.0)
        seconds = transfer_s(
            1_000_000,
            shape,
            chip,
            same_node=self.gpus <= self.gpus_per_node,
            source_degree=degree,
            target_degree=degree,
        )
        return SimulatedLink(setup_s=SETUP_S, token_s=(seconds - SETUP_S) / 1_000_000)


FAULTS = ("tool_failure_share", "walltime_s", "engine_mtbf_s", "engine_restart_s")
"""Fields of `SimulatedFaults` that a file may set."""

CLUSTERS: Mapping[str, Cluster] = {
    "hopper8": Cluster(gpus=8),
    "hopper64": Cluster(gpus=64),
    "hopper1024": Cluster(gpus=1024),
    # The rollout pools of RollArt's Figure 11a: 206 units of cost, with an H20 as the unit and an H800 at 2.85.
    "h800-72": Cluster(72, pools=(HardwarePool("H800", 72, "h800"),)),
    "h20-208": Cluster(208, pools=(HardwarePool("H20", 208, "h20"),)),
    "h800-64-h20-24": Cluster(88, pools=(HardwarePool("H800", 64, "h800"), HardwarePool("H20", 24, "h20"))),
}


def cluster_of(name_or_file: str) -> Cluster:
    """A named cluster, or the one that a TOML file describes."""
    if name_or_file in CLUSTERS:
        return CLUSTERS[name_or_file]
    path = Path(name_or_file)
    if not path.is_file():
        raise BadInput(f"cluster {name_or_file!r}: neither one of {', '.join(CLUSTERS)} nor an existing TOML file")
    cluster = _checked(read_toml(path, "cluster"), name_or_file)
    return replace(cluster, tables=tuple(_beside(path, name) for name in cluster.tables))


def _beside(cluster_file: Path, table: str) -> str:
    """Path of a table file relative to the cluster file; the name of a shipped table is returned unchanged."""
    return table if table in table_names() else str(cluster_file.parent / table)


def with_choices(cluster: Cluster, *, tp: int | None, slots: int | None, tables: Sequence[str] = ()) -> Cluster:
    """The cluster with another uniform degree, number of slots, or measured tables, as far as given."""
    if tp is not None:
        cluster = replace(cluster, tp=tp)
    if tables:
        cluster = replace(cluster, tables=tuple(tables))
    return cluster if slots is None else replace(cluster, slots=slots)


def _checked(content: Mapping[str, Any], where: str) -> Cluster:
    values = _read(content, [each.name for each in fields(Cluster)], f"cluster {where}")
    if values.get("pools"):
        values.setdefault("gpus", sum(pool.gpus for pool in values["pools"]))
    if "gpus" not in values:
        raise BadInput(f"cluster {where} lacks 'gpus': give their number")
    return Cluster(**values)


def _read(content: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """Values by field name; the keys of `content` are the names with dashes."""
    known = {name.replace("_", "-"): name for name in names}
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            raise BadInput(f"{where} has unknown key '{key}'{hint}; allowed: {', '.join(known)}")
        values[known[key]] = _value(known[key], value, f"{where}: {key}")
    return values


def _value(name: str, value: Any, where: str) -> Any:
    if name in ("gpu", "believed_gpu"):
        if not isinstance(value, str):
            raise BadInput(f"{where} is {value!r}: use the name of a GPU")
        gpu_of(value)
        return value
    if name == "tables":
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise BadInput(f"{where} is {value!r}: use a list of names or files of measured tables")
        return tuple(value)
    if name == "pools":
        return _pools(value, where)
    if name == "hardware":
        if not isinstance(value, str) or not value:
            raise BadInput(f"{where} is {value!r}: use the name of a class of hardware")
        return value
    if name == "faults":
        if not isinstance(value, dict):
            raise BadInput(f"{where} is {value!r}: use a section [faults]")
        return SimulatedFaults(**_read(value, FAULTS, where))
    if name.endswith("_share"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise BadInput(f"{where} is {value!r}: use a share from 0 to 1")
        return float(value)
    if name == "kv_transfer":
        if not isinstance(value, bool):
            raise BadInput(f"{where} is {value!r}: use true or false")
        return value
    if name == "tp" and isinstance(value, list):
        if not value:
            raise BadInput(f"{where} is empty: give a degree, or one for each engine")
        return tuple(_whole(one, 1, where) for one in value)
    if name.endswith("_s"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise BadInput(f"{where} is {value!r}: use seconds from 0 up")
        return float(value)
    return _whole(value, 0 if name in ("slots", "tool_cpus") else 1, where)


def _pools(value: Any, where: str) -> tuple[HardwarePool, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise BadInput(f"{where} is {value!r}: use sections [[pools]]")
    read = [_read(one, [each.name for each in fields(HardwarePool)], where) for one in value]
    for one in read:
        for name in ("hardware", "gpus", "gpu"):
            if name not in one:
                raise BadInput(f"{where}: a pool lacks '{name}'")
        if not isinstance(one.get("tp", 1), int):
            raise BadInput(f"{where}: tp is {one['tp']!r}: use one degree for a pool")
    return tuple(HardwarePool(**one) for one in read)


def _whole(value: Any, least: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(f"{where} is {value!r}: use a whole number of at least {least}")
    return value
