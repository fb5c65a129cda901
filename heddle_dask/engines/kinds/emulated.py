"""The emulated engine: a process that speaks vLLM's dialect and takes the time of a cost model instead of a model's."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from heddle_dask.engines import wire
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.defaults import with_small_defaults
from heddle_dask.engines.dialect import Dialect
from heddle_dask.engines.emulated.options import DEFAULT_COST, EmulatedOptions
from heddle_dask.engines.spec import EngineCommand, EngineKind, EngineOptions, EngineSpec

if TYPE_CHECKING:
    from heddle_dask.cost.engine_cost import EngineCost
    from heddle_dask.engines.emulated.traits import EmulatedTraits


@dataclass(frozen=True, slots=True)
class EmulatedKind:
    name: str = "emulated"
    options_type: type[EngineOptions] = EmulatedOptions
    server_module: str = "heddle_dask.engines.emulated"
    takes_cost: bool = True
    # The engine states queue time and prefill time apart.
    prefill_includes_queue: bool = False

    @property
    def dialect(self) -> Dialect:
        """vLLM's, answered as one JSON object."""
        return wire

    @property
    def default_cost(self) -> Mapping[str, Any]:
        return DEFAULT_COST

    def check_installed(self) -> None:
        """Nothing: the engine comes with this package."""

    def check_model(self, model: str, options: EngineOptions) -> None:
        """Nothing: only the end token is read, where the model is a directory."""

    def check_tp_degree(self, model: str, tp_degree: int) -> None:
        """Nothing: the cost says at which degrees it is known."""

    def check(self, spec: EngineSpec) -> None:
        """Raise `BadInput` for options that cannot be, or a KV cache too small for one context."""
        _traits_of(spec)

    def completed(self, spec: EngineSpec) -> EngineSpec:
        return with_small_defaults(spec)

    def command(self, spec: EngineSpec, address: EngineAddress) -> EngineCommand:
        listen = ("--uds", address.socket) if address.socket else ("--port", str(address.port))
        options = (*listen, "--spec", json.dumps(self.completed(spec).to_mapping()))
        return EngineCommand((sys.executable, "-m", self.server_module, *options), {})

    def uses_gpus(self) -> bool:
        return False

    def described(self, spec: EngineSpec) -> str:
        return self.name

    def kv_bytes_per_token(self, spec: EngineSpec) -> float:
        return float(_traits_of(spec).emulation.kv_bytes_per_token)

    def options_for(
        self,
        cost: Mapping[str, Any] | None = None,
        *,
        time_scale: float = 1.0,
        max_positions: int | None = None,
    ) -> EngineOptions:
        """Cost and time scale apply; any context length is accepted."""
        return EmulatedOptions(cost=cost, time_scale=time_scale)

    def effective_cost(self, spec: EngineSpec, cost: EngineCost) -> EngineCost:
        capacity_tokens = _traits_of(spec).kv_capacity_tokens
        return replace(cost.scaled(spec.options.time_scale), capacity_tokens=capacity_tokens)

    def believed_cost(self, spec: EngineSpec) -> None:
        """None: its cost is in its options, and no matter of the hardware."""


def _traits_of(spec: EngineSpec) -> EmulatedTraits:
    # Costs need numpy, which commands that start no engine do without.
    from heddle_dask.engines.emulated.traits import traits_of

    return traits_of(with_small_defaults(spec))


EMULATED: EngineKind = EmulatedKind()
