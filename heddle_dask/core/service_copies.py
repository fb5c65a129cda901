"""What is on the GPUs of one host: copies of model services, and chunks in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from heddle_dask.core.gpu_chunks import GpuBuddies, GpuChunk
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.resources import COPY_BYTES, GPUS, MODELS_PER_GPU, Resources
from heddle_dask.core.transitions import COPY, CopyEvent, CopyState

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
        """What names it on its host."""
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
        """Whether it holds memory of its GPUs."""
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
        """Recompute what is in use from the copies.

        Raises
        ------
        AssertionError
            The accounts differ, or a GPU has more copies than its memory has room for.
        """
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
