"""The traits and faults of an emulated engine: parsed once, unknown keys refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from heddle_dask.core.errors import BadInput, check_keys
from heddle_dask.cost.engine_cost import EngineCost, cost_from_mapping
from heddle_dask.engines.emulated.options import DEFAULT_COST, emulated_options
from heddle_dask.engines.spec import EngineSpec


@dataclass(frozen=True, slots=True)
class _Traits:
    option: ClassVar[str]  # name of the engine option, for messages

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> Self:
        """Read from parsed JSON or TOML; an unknown key or impossible value is BadInput."""
        check_keys(f"engine {cls.option}", mapping or (), [field.name for field in fields(cls)])
        return cls(**(mapping or {}))

    def _check_number(self, name: str, least: float) -> None:
        value = getattr(self, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and least <= value < math.inf):
            raise BadInput(f"engine {self.option} {name} is {value!r}: use a number of at least {least:g}")


@dataclass(frozen=True, slots=True)
class EmulatedFaults(_Traits):
    """Faults on request. Counts are of steps received since the faults were set, warm-up excluded.

    Attributes
    ----------
    fail_start
        Print this line and exit during start-up.
    start_delay_s
        Sleep that long before answering.
    crash_after_requests
        Exit without a message when the step after this many arrives.
    hang_after_requests
        Stop answering, health checks included, from the step after this many.
    stuck_after_requests
        Answer no step any more from the step after this many, and generate no token; health checks and all else are
        answered.
    refuse_after_requests
        Answer HTTP 500 to every step after this many.
    slow_factor
        Factor on the cost model's seconds.
    kv_source_lost
        Break every connection by which another engine fetches KV.
    kv_blocks_expired
        Free exported blocks immediately.
    fail_load
        Answer HTTP 500 with this text instead of loading weights.
    crash_on_load
        Exit without a message when weights are to be loaded.
    load_delay_s
        Real seconds that loading weights takes in addition.
    """

    option = "faults"
    fail_start: str | None = None
    start_delay_s: float = 0.0
    crash_after_requests: int | None = None
    hang_after_requests: int | None = None
    stuck_after_requests: int | None = None
    refuse_after_requests: int | None = None
    slow_factor: float = 1.0
    kv_source_lost: bool = False
    kv_blocks_expired: bool = False
    fail_load: str | None = None
    crash_on_load: bool = False
    load_delay_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("crash", "hang", "stuck", "refuse"):
            self._check_number(f"{name}_after_requests", 0)
        self._check_number("start_delay_s", 0)
        self._check_number("load_delay_s", 0)
        self._check_number("slow_factor", 1e-6)


@dataclass(frozen=True, slots=True)
class Emulation(_Traits):
    """Traits beyond the spec.

    Attributes
    ----------
    mean_length_tokens
        Mean of the geometric length of a step in which end tokens count.
    end_token_id
        None: the first of the model directory's ``eos_token_id``, or 0.
    kv_capacity_tokens
        None: the capacity of the cost model.
    kv_bytes_per_token
        Bytes of a token's KV that a transfer moves; the default is that of Qwen3 8B in bfloat16.
    transfer_bytes_per_s, transfer_fixed_s
        A transfer takes `transfer_fixed_s` plus its bytes divided by the rate, in seconds of the cost model.
    kv_lease_s
        Real seconds that exported blocks stay pinned.
    load_bytes_per_s, load_fixed_s
        Loading weights takes `load_fixed_s` plus the size of their files divided by the rate, in seconds of the cost
        model. The default rate is that of a PCIe 4.0 link with 16 lanes; the fixed time was measured with vLLM 0.32 on
        a CPU.
    """

    option = "emulation"
    mean_length_tokens: float = 64.0
    end_token_id: int | None = None
    kv_capacity_tokens: int | None = None
    kv_bytes_per_token: int = 147_456
    transfer_bytes_per_s: float = 10e9
    transfer_fixed_s: float = 0.002
    kv_lease_s: float = 30.0
    load_bytes_per_s: float = 25e9
    load_fixed_s: float = 0.02

    def __post_init__(self) -> None:
        self._check_number("mean_length_tokens", 1)
        self._check_number("end_token_id", 0)
        self._check_number("kv_capacity_tokens", 2)
        self._check_number("kv_bytes_per_token", 1)
        self._check_number("transfer_bytes_per_s", 1)
        self._check_number("transfer_fixed_s", 0)
        self._check_number("kv_lease_s", 0)
        self._check_number("load_bytes_per_s", 1)
        self._check_number("load_fixed_s", 0)


@dataclass(frozen=True, slots=True)
class EmulatedTraits:
    """Everything that the emulated engine's server needs, checked."""

    cost: EngineCost
    faults: EmulatedFaults
    emulation: Emulation
    end_token_id: int
    mean_length_tokens: float
    kv_capacity_tokens: int


def traits_of(spec: EngineSpec) -> EmulatedTraits:
    """Check and complete the spec of an emulated engine."""
    options = emulated_options(spec.options)
    told = cost_from_mapping(options.cost if options.cost is not None else DEFAULT_COST, spec.tp_degree)
    cost = told.for_contexts(spec.named_context_tokens)
    emulation = Emulation.from_mapping(options.emulation)
    capacity = emulation.kv_capacity_tokens or cost.capacity_tokens
    if capacity < spec.named_context_tokens + cost.block_tokens:
        raise BadInput(
            f"engine KV cache holds {capacity} tokens, fewer than max_model_len "
            f"{spec.named_context_tokens} plus one block of {cost.block_tokens}: shorten the one or enlarge the other"
        )
    end = emulation.end_token_id
    return EmulatedTraits(
        cost=cost,
        faults=EmulatedFaults.from_mapping(options.faults),
        emulation=emulation,
        end_token_id=_model_end_token(spec.model) if end is None else end,
        mean_length_tokens=emulation.mean_length_tokens,
        kv_capacity_tokens=capacity,
    )


def _model_end_token(model: str) -> int:
    for name in ("generation_config.json", "config.json"):
        path = Path(model) / name
        if not path.is_file():
            continue
        try:
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except ValueError as error:
            raise BadInput(f"{path} is no JSON: {error}") from error
        if isinstance(ids, list) and ids:
            ids = ids[0]
        if isinstance(ids, int):
            return ids
    return 0
