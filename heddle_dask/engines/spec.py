"""What an engine is to be: plain data that travels by pickle and JSON, checked once, here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from heddle_dask.core.errors import BadInput

EngineKind = Literal["vllm", "emulated"]
ENGINE_KINDS: tuple[str, ...] = get_args(EngineKind)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine, described.

    Attributes
    ----------
    kind
        ``"vllm"`` or ``"emulated"``.
    model
        A model directory (or, for vLLM, a name it can load). The emulated engine only reads the end
        token from it, where it is a directory.
    slots
        Most sequences in one batch.
    steps_ahead
        How many steps more may wait in the engine's own queue. A slot that a step leaves is filled in the next
        iteration then, and not only when the step's end is known here and another one has been sent.
    max_model_len
        Longest context, prompt and generated tokens together.
    kv_cache_gib
        KV cache of vLLM on CPUs. On GPUs vLLM sizes the cache itself (`extra_args` with
        ``--gpu-memory-utilization``); the emulated engine's is counted in tokens (`emulation`).
    extra_args
        Appended to vLLM's command line as they are.
    cost
        Cost model of the emulated engine, see `heddle_dask.cost.engine_cost.cost_from_mapping`.
        None: the profile ``tiny-cpu``.
    faults
        Faults of the emulated engine, see `heddle_dask.engines.emulated.traits.Faults`.
    time_scale
        The emulated engine takes its model's seconds times this.
    cpu_threads
        OpenMP threads of a CPU build of vLLM.
    emulation
        Further traits of the emulated engine: ``mean_length_tokens`` (mean of the geometric length
        when end tokens count), ``end_token_id``, ``kv_capacity_tokens``; of its KV transfers
        ``kv_bytes_per_token``, ``transfer_bytes_per_s``, ``transfer_fixed_s``, ``kv_lease_s``.
    kv_transfer
        True: the engine can hand the KV cache of a context to another one and take one over
        (`EngineClient.export_kv` and `import_kv`); vLLM then runs with its NIXL connector.
    devices
        The GPUs of a GPU build of vLLM by name (``CUDA_VISIBLE_DEVICES``); none: those that its owner sees. Others run
        where they are.

    Raises
    ------
    BadInput
        A value that no engine can have.
    """

    kind: EngineKind
    model: str
    slots: int
    max_model_len: int
    dtype: str = "auto"
    tp_degree: int = 1
    seed: int = 0
    kv_cache_gib: float = 1.0
    extra_args: tuple[str, ...] = ()
    cost: Mapping[str, Any] | None = None
    faults: Mapping[str, Any] | None = None
    time_scale: float = 1.0
    cpu_threads: int = 1
    emulation: Mapping[str, Any] | None = None
    kv_transfer: bool = False
    devices: tuple[str, ...] = ()
    steps_ahead: int = 6

    def __post_init__(self) -> None:
        if self.kind not in ENGINE_KINDS:
            raise BadInput(f"engine kind {self.kind!r} is unknown: use {' or '.join(ENGINE_KINDS)}")
        if not isinstance(self.model, str) or not self.model:
            raise BadInput("engine model is empty: give a model directory")
        for name, least in (
            ("slots", 1),
            ("steps_ahead", 0),
            ("max_model_len", 2),
            ("tp_degree", 1),
            ("cpu_threads", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise BadInput(f"engine {name} is {value!r}: use a whole number of at least {least}")
        if not isinstance(self.kv_transfer, bool):
            raise BadInput(f"engine kv_transfer is {self.kv_transfer!r}: use true or false")
        if self.devices and len(self.devices) != self.tp_degree:
            named = ", ".join(self.devices)
            raise BadInput(
                f"engine devices are {named}: name {self.tp_degree}, one for each of tp_degree, or none"
            )
        for name in ("kv_cache_gib", "time_scale"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise BadInput(f"engine {name} is {value!r}: use a number above 0")

    def to_mapping(self) -> dict[str, Any]:
        """A JSON-able mapping from which `from_mapping` makes an equal spec."""
        mapping = asdict(self)
        mapping["extra_args"] = list(self.extra_args)
        mapping["devices"] = list(self.devices)
        return mapping

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> EngineSpec:
        """Read a spec from parsed JSON or TOML.

        Raises
        ------
        BadInput
            A key is unknown or missing, or a value is impossible.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(mapping) - set(known))
        if unknown:
            raise BadInput(f"engine spec has unknown key {unknown[0]!r}: use {', '.join(known)}")
        missing = [name for name in known[:4] if name not in mapping]
        if missing:
            raise BadInput(f"engine spec lacks {', '.join(missing)}")
        values = dict(mapping)
        values["extra_args"] = tuple(mapping.get("extra_args", ()))
        values["devices"] = tuple(mapping.get("devices", ()))
        return cls(**values)
