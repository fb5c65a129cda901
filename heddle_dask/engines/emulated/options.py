"""The options that only emulated engines have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import EngineOptions

DEFAULT_COST: Mapping[str, Any] = {"profile": "tiny-cpu"}


@dataclass(frozen=True, slots=True)
class EmulatedOptions(EngineOptions):
    """Options of an emulated engine.

    Attributes
    ----------
    cost
        Its cost model, see `heddle_dask.cost.engine_cost.cost_from_mapping`. None: `DEFAULT_COST`.
    faults
        See `heddle_dask.engines.emulated.traits.EmulatedFaults`.
    time_scale
        Real seconds for each second of the cost model.
    emulation
        See `heddle_dask.engines.emulated.traits.Emulation`.
    script
        Path of a file of replies, see `heddle_dask.engines.emulated.scripted`. None: tokens are plausible, no text.
    """

    cost: Mapping[str, Any] | None = None
    faults: Mapping[str, Any] | None = None
    time_scale: float = 1.0
    emulation: Mapping[str, Any] | None = None
    script: str | None = None

    def __post_init__(self) -> None:
        self._check_positive("time_scale")
        if self.script is not None and (not isinstance(self.script, str) or not self.script):
            raise BadInput(f"engine script is {self.script!r}: use the path of a file")

    def with_cost(self, cost: Mapping[str, Any]) -> Self:
        """The same options with another cost."""
        return replace(self, cost=cost)


def emulated_options(options: EngineOptions) -> EmulatedOptions:
    """The options, known to be those of an emulated engine."""
    if not isinstance(options, EmulatedOptions):
        raise BadInput(f"an emulated engine takes EmulatedOptions, not {type(options).__name__}")
    return options
