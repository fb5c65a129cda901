"""Which free chunk an action gets, of those that are large enough (ARL-Tangram, section 5.3)."""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.core.gpu_chunks import GpuChunk
from heddle_dask.core.service_copies import HostGpus, ServiceCopy
from heddle_dask.core.transitions import CopyState

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
    ranked = (
        (rank_chunk(gpus, service, chunk, split), chunk) for split, chunk in gpus.buddies.candidates(size)
    )
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
