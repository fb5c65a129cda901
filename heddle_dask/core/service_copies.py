"""What is on the GPUs of one host: copies of model services, how long they take to load, and chunks in use.

Of the free chunks that are large enough for an action, one is chosen as in ARL-Tangram, section 5.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from heddle_dask.core.gpu_chunks import GpuBuddies, GpuChunk, chunk_size
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.resources import COPY_BYTES, GPUS, MODELS_PER_GPU, ModelService, Resources
from heddle_dask.core.transitions import COPY, CopyEvent, CopyState

_WEIGHT = 0.25


class LoadSeconds:
    """Seconds of loads by service, number of GPUs, and whether host memory had a copy.

    An exponentially weighted mean of what was measured, in which the declared seconds count as the first measurement.
    """

    def __init__(self) -> None:
        self._mean: dict[tuple[str, int, bool], float] = {}

    def took(self, service: ModelService, gpus: int, cold: bool, seconds: float) -> None:
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


CopyKey = tuple[str, GpuChunk]

_IN_MEMORY = frozenset({CopyState.LOADING, CopyState.RESIDENT, CopyState.EVICTING})


@dataclass(slots=True, eq=False)
class ServiceCopy:
    """One model service on one chunk of GPUs; or, without a service, the exclusive use of a chunk by one action.

    Attributes
    ----------
    service
        Its service; empty: an action without one has the chunk, and the GPU memory, for itself.
    places
        Requests that it serves at the same time.
    waiting, running
        Actions that were granted a place and wait for it to be resident, and actions that run on it.
    turn_began_at
        When it became busy.
    used_at
        When its latest request ended, or it became resident: the least recently used one is evicted first.
    cold
        Whether its load had to read its files, as host memory had no copy.
    """

    service: str
    host_id: HostId
    chunk: GpuChunk
    places: int = 1
    state: CopyState = CopyState.CLEARING
    waiting: dict[ActionId, None] = field(default_factory=dict)
    running: dict[ActionId, None] = field(default_factory=dict)
    turn_began_at: float = 0.0
    used_at: float = 0.0
    cold: bool = False

    @property
    def key(self) -> CopyKey:
        return self.service, self.chunk

    @property
    def memory_key(self) -> tuple[str, int]:
        """What names its copy in host memory: chunks of one size share it."""
        return self.service, self.chunk.gpus

    @property
    def busy(self) -> bool:
        """Whether actions run on it, or wait for it: its chunk is in use."""
        return bool(self.running or self.waiting)

    @property
    def free_places(self) -> int:
        """Requests that it could take now."""
        return self.places - len(self.running) - len(self.waiting)

    @property
    def in_memory(self) -> bool:
        return self.state in _IN_MEMORY

    @property
    def idle(self) -> bool:
        """Whether it is cached: resident, and may be evicted."""
        return self.state is CopyState.RESIDENT and not self.busy

    def advance(self, event: CopyEvent) -> bool:
        """Apply `event`; False when the event is stale."""
        name = f"{self.service or 'an action'} on {self.host_id}, GPUs {self.chunk.first} to {self.chunk.end - 1}"
        after = COPY.next_state(self.state, event, name)
        if after is None:
            return False
        self.state = after
        return True


class HostGpus:
    """The GPUs of one host: which chunks are in use, which copies are there, and what host memory keeps.

    Parameters
    ----------
    host_id, resources
        Its id, and its resources: GPUs, `MODELS_PER_GPU`, `COPY_BYTES`.

    Attributes
    ----------
    copies
        Copies by service and chunk, none of them GONE.
    kept
        Bytes of the copies in host memory by service and number of GPUs, the least recently used first.
    """

    def __init__(self, host_id: HostId, resources: Resources) -> None:
        self.host_id = host_id
        self.buddies = GpuBuddies(resources[GPUS])
        self.models_per_gpu = max(1, resources[MODELS_PER_GPU])
        self.copy_bytes = resources[COPY_BYTES]
        self.copies: dict[CopyKey, ServiceCopy] = {}
        self.kept: dict[tuple[str, int], int] = {}

    def __repr__(self) -> str:
        return f"HostGpus(used={sorted(self.buddies.used)}, copies={self.copies}, kept={self.kept})"

    @property
    def free_gpus(self) -> int:
        """GPUs that no action uses; cached copies do not count."""
        return self.buddies.gpus - sum(chunk.gpus for chunk in self.buddies.used)

    def on(self, chunk: GpuChunk) -> Iterator[ServiceCopy]:
        """Copies on any of these GPUs, in memory or not."""
        return (copy for copy in self.copies.values() if copy.chunk.overlaps(chunk))

    def has_room(self, copy: ServiceCopy) -> bool:
        """Whether the memory of its GPUs has room for the copy now."""
        return not self._crowded(copy, leaving=False)

    def victim(self, copy: ServiceCopy) -> ServiceCopy | None:
        """The least recently used cached copy that must leave for this one; None: enough leave, or none can."""
        crowded = self._crowded(copy, leaving=True)
        idle = [other for other in self.copies.values() if other.idle and other is not copy]
        there = [other for other in idle if any(other.chunk.overlaps(gpu) for gpu in crowded)]
        return min(there, key=lambda other: (other.used_at, other.key), default=None)

    def could_make_room(self, copy: ServiceCopy) -> bool:
        """Whether there is room once all cached copies have left."""
        return not self._crowded(copy, leaving=True, without_idle=True)

    def _crowded(self, copy: ServiceCopy, *, leaving: bool, without_idle: bool = False) -> list[GpuChunk]:
        """The GPUs whose memory has no room for the copy; `leaving`: when those that are being evicted have left."""
        others = [
            other
            for other in self.on(copy.chunk)
            if other is not copy
            and other.in_memory
            and not (leaving and other.state is CopyState.EVICTING)
            and not (without_idle and other.idle)
        ]
        if not others:
            return []
        crowded = []
        for first in range(copy.chunk.first, copy.chunk.end):
            gpu = GpuChunk(first, 1)
            there = [other for other in others if other.chunk.overlaps(gpu)]
            alone = not copy.service or any(not other.service for other in there)
            if len(there) >= (1 if alone else self.models_per_gpu):
                crowded.append(gpu)
        return crowded

    def restoring(self, key: tuple[str, int], without: ServiceCopy | None = None) -> bool:
        """Whether a copy is being loaded from this copy in host memory, or into it."""
        loading = (c for c in self.copies.values() if c.state is CopyState.LOADING and c is not without)
        return any(copy.memory_key == key for copy in loading)

    def keep(self, copy: ServiceCopy, size_bytes: int) -> list[tuple[str, int]]:
        """Keep the copy in host memory too, if the budget has room; it is then the most recently used one.

        Returns
        -------
        What is dropped for it.
        """
        held = self.kept.pop(copy.memory_key, None)
        if held is not None:
            self.kept[copy.memory_key] = held
            return []
        free = self.copy_bytes - sum(self.kept.values()) if self.copy_bytes else size_bytes
        dropped: list[tuple[str, int]] = []
        for name, held in self.kept.items():
            if free >= size_bytes:
                break
            if held and not self.restoring(name):
                dropped.append(name)
                free += held
        if free < size_bytes:
            return []
        for name in dropped:
            del self.kept[name]
        self.kept[copy.memory_key] = size_bytes
        return dropped

    def check_integrity(self) -> None:
        """Recompute what is in use from the copies."""
        busy = sorted(copy.chunk for copy in self.copies.values() if copy.busy)
        assert busy == sorted(self.buddies.used), self
        assert not any(a.overlaps(b) for a, b in pairwise(busy)), self
        for key, copy in self.copies.items():
            assert key == copy.key and copy.state is not CopyState.GONE, self
            assert copy.free_places >= 0, self
            assert not copy.waiting or copy.state in (CopyState.CLEARING, CopyState.LOADING), self
            assert not copy.running or copy.state in (CopyState.RESIDENT, CopyState.LOST), self
            assert copy.state is not CopyState.LOST or copy.busy, self
        for first in range(self.buddies.gpus):
            there = [c for c in self.on(GpuChunk(first, 1)) if c.in_memory]
            assert len(there) <= self.models_per_gpu, self
            assert len(there) <= 1 or all(copy.service for copy in there), self
        assert not self.copy_bytes or sum(self.kept.values()) <= self.copy_bytes, self


ChunkRank = tuple[int, int, float, int]
"""Smaller is better: how far the service is from being resident there (0: it is), the size of the free chunk that is
split, when what has to leave was last used, and the first GPU."""


def rank_chunk(gpus: HostGpus, service: str, chunk: GpuChunk, split: int) -> ChunkRank | None:
    """How good a free chunk is for a service; None while the chunk's own copy of it leaves."""
    own = gpus.copies.get((service, chunk))
    if own is not None:
        if own.state is CopyState.EVICTING:
            return None
        return (0 if own.state is CopyState.RESIDENT else 1), split, 0.0, chunk.first
    # Memory that is empty comes before memory that has to be freed, and old copies leave before new ones.
    in_the_way = not gpus.has_room(ServiceCopy(service, gpus.host_id, chunk))
    used = [copy.used_at for copy in gpus.on(chunk) if copy.in_memory] if in_the_way else []
    return 2 + in_the_way, split, max(used, default=0.0), chunk.first


def ranked_chunks(gpus: HostGpus, service: str, size: int) -> list[tuple[ChunkRank, GpuChunk]]:
    """The free chunks of this size, best first."""
    ranked = ((rank_chunk(gpus, service, chunk, split), chunk) for split, chunk in gpus.buddies.candidates(size))
    return sorted((rank, chunk) for rank, chunk in ranked if rank is not None)


def choose_chunk(gpus: HostGpus, service: str, size: int, later: Sequence[int]) -> GpuChunk | None:
    """The best free chunk of this size that leaves room for the demands of the same pass; None without a free chunk.

    A chunk on which the service is cached comes first, even where a larger chunk is split for it; but not if the
    demands that follow, `later`, would then not fit although they do with the smallest sufficient chunk.
    """
    ranked = ranked_chunks(gpus, service, size)
    if not ranked or not later:
        return ranked[0][1] if ranked else None
    for _, chunk in ranked:
        gpus.buddies.take(chunk)
        left = gpus.buddies.counts().take_all(later)
        gpus.buddies.give_back(chunk)
        if left is not None:
            return chunk
    return min(ranked, key=lambda each: (each[0][1], each[0]))[1]
