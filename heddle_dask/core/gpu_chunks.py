"""GPUs of one host in buddy chunks (ARL-Tangram, section 5.3; cells as in HiveD).

A chunk is an aligned interval of GPUs: its length is a power of two, and its first GPU is a multiple of its length.
Chunks are split and merged within a host, never across hosts. A host whose number of GPUs is no power of two consists
of the largest aligned chunks: 6 GPUs are (0, 4) and (4, 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class GpuChunk:
    """The GPUs from `first` to ``first + gpus - 1`` of one host."""

    first: int
    gpus: int

    @property
    def end(self) -> int:
        """The GPU after its last one."""
        return self.first + self.gpus

    def overlaps(self, other: GpuChunk) -> bool:
        """Whether the two have a GPU in common; of two chunks, one then contains the other."""
        return self.first < other.end and other.first < self.end


def chunk_size(gpus: int) -> int:
    """The size of the smallest chunk with this many GPUs: the next power of two."""
    return 1 << max(0, gpus - 1).bit_length()


@dataclass(frozen=True, slots=True)
class FreeChunks:
    """How many free chunks of each size there are, after all merges.

    Attributes
    ----------
    counts
        At index i, the number of free chunks of 2**i GPUs.
    """

    counts: tuple[int, ...] = ()

    @property
    def gpus(self) -> int:
        return sum(count << level for level, count in enumerate(self.counts))

    @property
    def largest(self) -> int:
        """Size of the largest free chunk; 0 without one."""
        return max((1 << level for level, count in enumerate(self.counts) if count), default=0)

    def take(self, gpus: int) -> FreeChunks | None:
        """What is left after taking the smallest sufficient chunk, split if it is larger; None: none suffices."""
        wanted = chunk_size(gpus).bit_length() - 1
        for level in range(wanted, len(self.counts)):
            if self.counts[level]:
                left = list(self.counts)
                left[level] -= 1
                for half in range(wanted, level):
                    left[half] += 1
                return FreeChunks(tuple(left))
        return None

    def take_all(self, demands: Iterable[int]) -> FreeChunks | None:
        """What is left after taking a chunk for each of these numbers of GPUs in turn; None: they do not all fit."""
        left: FreeChunks | None = self
        for gpus in demands:
            left = left.take(gpus) if left is not None else None
        return left


class GpuBuddies:
    """Which chunks of one host are in use."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.used: set[GpuChunk] = set()

    def take(self, chunk: GpuChunk) -> None:
        if not self.is_free(chunk):
            raise ValueError(f"{chunk} is not free on a host of {self.gpus} GPUs with {sorted(self.used)} in use")
        self.used.add(chunk)

    def give_back(self, chunk: GpuChunk) -> None:
        """Give a chunk back; it merges with its free buddies."""
        self.used.remove(chunk)

    def is_free(self, chunk: GpuChunk) -> bool:
        """Whether it is a chunk of this host of which no GPU is in use."""
        aligned = chunk.gpus == chunk_size(chunk.gpus) and chunk.first % chunk.gpus == 0
        inside = chunk.first >= 0 and chunk.end <= self.gpus
        return aligned and inside and not any(chunk.overlaps(used) for used in self.used)

    def free(self) -> Iterator[GpuChunk]:
        """The free chunks after all merges, from left to right."""
        first = 0
        for used in [*sorted(self.used), GpuChunk(self.gpus, 1)]:
            while first < used.first:
                size = (first & -first) or chunk_size(self.gpus)
                while first + size > used.first:
                    size //= 2
                yield GpuChunk(first, size)
                first += size
            first = used.end

    def counts(self) -> FreeChunks:
        levels = [0] * (max(1, self.gpus).bit_length())
        for chunk in self.free():
            levels[chunk.gpus.bit_length() - 1] += 1
        return FreeChunks(tuple(levels))

    def candidates(self, gpus: int) -> list[tuple[int, GpuChunk]]:
        """Every free chunk for this many GPUs, each with the size of the merged free chunk that contains it."""
        size = chunk_size(gpus)
        found: list[tuple[int, GpuChunk]] = []
        for free in self.free():
            found += [(free.gpus, GpuChunk(first, size)) for first in range(free.first, free.end - size + 1, size)]
        return found
