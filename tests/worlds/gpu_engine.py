"""An emulated engine that says it uses GPUs: it gets devices as a real one does, and needs none."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.engines.kinds.emulated import EmulatedKind


@dataclass(frozen=True, slots=True)
class GpuKind(EmulatedKind):
    """What it does not say itself is as in the emulated engine."""

    name: str = "emulated-gpu"

    def uses_gpus(self) -> bool:
        return True


GPU = GpuKind()
