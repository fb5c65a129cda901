"""An emulated engine that says it uses GPUs: it gets devices and chooses its limits as a real one does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heddle_dask.engines.kinds.emulated import EmulatedKind
from heddle_dask.engines.spec import EngineCommand, EngineSpec

CHOSEN_SLOTS = 7
CHOSEN_CONTEXT_TOKENS = 777


@dataclass(frozen=True, slots=True)
class GpuKind(EmulatedKind):
    """What it does not say itself is as in the emulated engine."""

    name: str = "emulated-gpu"

    def uses_gpus(self) -> bool:
        return True

    def completed(self, spec: EngineSpec) -> EngineSpec:
        """Unchanged: the engine chooses by its memory, and tells when it answers."""
        return spec

    def command(self, spec: EngineSpec, port: int) -> EngineCommand:
        slots = CHOSEN_SLOTS if spec.slots is None else spec.slots
        longest = CHOSEN_CONTEXT_TOKENS if spec.max_model_len is None else spec.max_model_len
        return super(GpuKind, self).command(replace(spec, slots=slots, max_model_len=longest), port)


GPU = GpuKind()
