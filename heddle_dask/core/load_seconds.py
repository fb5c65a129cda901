"""How long a model service takes to become resident, learned from finished loads."""

from __future__ import annotations

from heddle_dask.core.gpu_chunks import chunk_size
from heddle_dask.core.pools import ModelService

_WEIGHT = 0.25


class LoadSeconds:
    """Seconds of loads by service, number of GPUs, and whether host memory had a copy.

    An exponentially weighted mean of what was measured, in which the declared seconds count as the first measurement.
    """

    def __init__(self) -> None:
        self._mean: dict[tuple[str, int, bool], float] = {}

    def took(self, service: ModelService, gpus: int, cold: bool, seconds: float) -> None:
        """Learn from a load that has succeeded."""
        before = self.expected(service, gpus, cold)
        mean = seconds if before is None else before + _WEIGHT * (seconds - before)
        self._mean[service.name, gpus, cold] = mean

    def expected(self, service: ModelService, gpus: int, cold: bool) -> float | None:
        """Seconds of the next load; None while nothing is declared or measured."""
        known = self._mean.get((service.name, gpus, cold))
        if known is not None:
            return known
        declared = service.cold_load_s if cold else service.load_s
        by_size = {chunk_size(n): seconds for n, seconds in zip(service.gpus, declared, strict=False)}
        return by_size.get(gpus)
