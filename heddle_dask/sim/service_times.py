"""How long model services take in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from heddle_dask.core.errors import BadInput
from heddle_dask.core.gpu_chunks import chunk_size
from heddle_dask.core.resources import ModelService


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """Seconds of loads and evictions, and what requests of one batch cost each other.

    Attributes
    ----------
    link_bytes_s
        Bytes per second from host memory to one GPU; the GPUs of a copy load their parts at the same time.
    files_bytes_s
        Bytes per second from files to the GPUs of a copy, for a service without a copy in host memory.
    setup_s
        Seconds of every load beside the copying.
    evict_s
        Seconds of an eviction.
    batch_cost
        A request in a batch of n runs 1 + batch_cost (n - 1) times as long as alone. 0: batches are free; 1: requests
        share the copy, so that batching gains nothing.
    prepared
        Whether host memory had all copies before the rollout, so that the first load of a service is not cold.
    failure_share
        Share of loads that fail, after half their time.
    """

    link_bytes_s: float = 50e9
    files_bytes_s: float = 5e9
    setup_s: float = 0.05
    evict_s: float = 0.02
    batch_cost: float = 0.5
    prepared: bool = False
    failure_share: float = 0.0

    def __post_init__(self) -> None:
        if (
            min(self.link_bytes_s, self.files_bytes_s) <= 0
            or min(self.setup_s, self.evict_s, self.batch_cost) < 0
        ):
            raise BadInput("service times: rates must be above 0, and seconds at least 0")

    def load_s(self, service: ModelService, gpus: int, cold: bool) -> float:
        """Seconds of a load: as declared for this size, otherwise bytes over the rate."""
        cold = cold and not self.prepared
        declared = service.cold_load_s if cold else service.load_s
        by_size = {chunk_size(n): seconds for n, seconds in zip(service.gpus, declared, strict=False)}
        if gpus in by_size:
            return by_size[gpus]
        rate = self.files_bytes_s if cold else self.link_bytes_s * gpus
        return self.setup_s + service.host_bytes / rate
