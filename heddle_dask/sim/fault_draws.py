"""Random faults, drawn from the seed and a name, not in order of time: the same calls fail under every strategy."""

from __future__ import annotations

import random

from heddle_dask.sim.fleet import SimulatedFaults


class FaultDraws:
    """Fault draws of one simulation."""

    def __init__(self, faults: SimulatedFaults, seed: int) -> None:
        self._faults, self._seed = faults, seed

    def tool_fails(self, action_id: str) -> bool:
        """Whether this call ends with an error."""
        return self._below(self._faults.tool_failure_share, action_id)

    def life_s(self, engine_id: str) -> float:
        """Seconds from an engine's start to its death; 0: it does not die."""
        mean_s = self._faults.engine_mtbf_s
        return self._draw(f"life of {engine_id}").expovariate(1 / mean_s) if mean_s else 0.0

    def _below(self, share: float, name: str) -> bool:
        return share > 0 and self._draw(name).random() < share

    def _draw(self, name: str) -> random.Random:
        # A seed of type str is hashed by SHA-512, not by `hash`: the same in every process.
        return random.Random(f"faults {self._seed} {name}")
