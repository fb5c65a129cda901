"""Buddy chunks against a list of GPUs: free chunks are the largest aligned ones, and counts foresee every take."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.core_builders import action_of

from heddle_dask.core.gpu_chunks import FreeChunks, GpuBuddies, GpuChunk, chunk_size
from heddle_dask.core.resources import Amounts, ResourceDemand
from heddle_dask.core.waiting_actions import on_chunks


def aligned(gpus: int) -> list[GpuChunk]:
    """Every chunk of a host of so many GPUs."""
    sizes = [2**level for level in range(gpus.bit_length())]
    return [GpuChunk(first, size) for size in sizes for first in range(0, gpus - size + 1, size)]


def largest_free(gpus: int, used: set[int]) -> list[GpuChunk]:
    """The free chunks that no larger free chunk contains, from left to right."""
    free = [c for c in aligned(gpus) if not used & set(range(c.first, c.end))]
    inside = {c for c in free for other in free if other.gpus > c.gpus and other.overlaps(c)}
    return sorted(set(free) - inside)


@given(st.integers(1, 16), st.lists(st.tuples(st.integers(1, 16), st.integers(0, 99)), max_size=40))
def test_histories_of_takes_and_returns_agree_with_a_list_of_gpus(gpus: int, moves: list[tuple[int, int]]) -> None:
    buddies, held, used = GpuBuddies(gpus), [], set[int]()
    for size, pick in moves:
        if held and pick % 3 == 0:
            chunk = held.pop(pick % len(held))
            buddies.give_back(chunk)
            used -= set(range(chunk.first, chunk.end))
        else:
            foreseen, before = buddies.counts().take(size), buddies.candidates(size)
            wanted = {c for c in aligned(gpus) if c.gpus == chunk_size(size)}
            assert {c for _, c in before} == {c for c in wanted if not used & set(range(c.first, c.end))}
            assert (foreseen is None) == (not before)
            if before:
                smallest = [c for split, c in before if split == min(before)[0]]
                chunk = smallest[pick % len(smallest)]
                buddies.take(chunk)
                held.append(chunk)
                used |= set(range(chunk.first, chunk.end))
                assert buddies.counts() == foreseen, "splitting the smallest one is what the counts foresee"
        assert list(buddies.free()) == largest_free(gpus, used)
        assert buddies.counts().gpus == gpus - len(used)
        assert buddies.counts().largest == max((c.gpus for c in buddies.free()), default=0)


@given(st.integers(1, 16), st.lists(st.integers(1, 8), max_size=6))
def test_counts_take_the_smallest_sufficient_chunk_and_never_compose(gpus: int, demands: list[int]) -> None:
    buddies, counts = GpuBuddies(gpus), GpuBuddies(gpus).counts()
    for size in demands:
        left, found = counts.take(size), buddies.candidates(size)
        assert (left is None) == (not found)
        if left is None:
            return
        buddies.take(min(found)[1])
        counts = left
        assert counts == buddies.counts()


def test_two_free_halves_of_different_pairs_make_no_chunk() -> None:
    buddies = GpuBuddies(8)
    buddies.take(GpuChunk(0, 2))
    buddies.take(GpuChunk(4, 2))
    assert buddies.counts() == FreeChunks((0, 2, 0, 0))
    assert buddies.counts().take(4) is None
    buddies.give_back(GpuChunk(0, 2))
    assert buddies.counts().take(3) == FreeChunks((0, 1, 0, 0))
    assert buddies.counts().take_all([4, 2]) == FreeChunks((0, 0, 0, 0))
    assert buddies.counts().take_all([2, 4]) == FreeChunks((0, 0, 0, 0))
    assert buddies.counts().take_all([4, 4]) is None


@pytest.mark.parametrize("chunk", [GpuChunk(1, 2), GpuChunk(0, 3), GpuChunk(4, 4), GpuChunk(2, 1)])
def test_only_free_chunks_of_the_host_are_taken(chunk: GpuChunk) -> None:
    buddies = GpuBuddies(6)
    buddies.take(GpuChunk(2, 2))
    with pytest.raises(ValueError, match="is not free on a host of 6 GPUs"):
        buddies.take(chunk)


def test_a_range_of_gpus_however_wide_is_a_few_sizes_of_chunks() -> None:
    def sizes(asked: Amounts) -> Amounts:
        request = replace(action_of("a", "t", pool="gpu"), demand=ResourceDemand.of(gpus=asked))
        return on_chunks(request, {})[0].demand["gpus"]

    assert sizes(Amounts(3, 5)) == Amounts(4, 4)
    assert sizes(Amounts(0, 3)) == Amounts(1, 2, (1, 2))
    assert sizes(Amounts(1, 2**62)).only == tuple(2**n for n in range(63))
