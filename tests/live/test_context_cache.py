from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.engines.contract import FIRST, engine_priority
from heddle_dask.live.worker.context_cache import EMPTY, CachedContext, ContextCache, crc_of

ids = st.lists(st.integers(0, 2**31 - 1), max_size=30)


def data(values: list[int]) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


@given(st.lists(ids, max_size=6))
def test_extending_piece_by_piece_equals_extending_at_once(pieces: list[list[int]]) -> None:
    stepwise = CachedContext(EMPTY, 0)
    for piece in pieces:
        stepwise = stepwise.extended(data(piece))
    whole = [token for piece in pieces for token in piece]
    at_once = CachedContext.of(data(whole))
    assert stepwise.token_ids.tolist() == at_once.token_ids.tolist() == whole
    assert stepwise.crc == at_once.crc == crc_of(data(whole))
    assert stepwise.is_base(len(whole), at_once.crc)


@given(ids, ids)
def test_a_base_that_diverged_is_a_miss(one: list[int], other: list[int]) -> None:
    context = CachedContext.of(data(one))
    wanted = CachedContext.of(data(other))
    assert context.is_base(len(other), wanted.crc) == (one == other)


def test_the_cache_drops_the_least_recently_used_first() -> None:
    cache = ContextCache(capacity_tokens=10)
    for name in "abc":
        cache.put("s", name, CachedContext.of(data([1, 2, 3, 4])))
        cache.get("s", "a")
    assert cache.get("s", "b") is None
    assert cache.get("s", "a") is not None and cache.get("s", "c") is not None
    assert cache.tokens == 8
    cache.put("s", "a", CachedContext.of(data([1])))
    assert cache.tokens == 5
    cache.drop("s", "c")
    cache.drop("s", "c")
    assert cache.tokens == 1


def test_one_context_larger_than_the_capacity_is_still_held() -> None:
    cache = ContextCache(capacity_tokens=2)
    cache.put("s", "a", CachedContext.of(data([1, 2, 3])))
    assert cache.get("s", "a") is not None


def test_engine_priority_reverses_our_sign_and_stays_in_range() -> None:
    ours = [5.0, -2.0, 1e12, 0.4, -1e12]
    assert sorted(ours, reverse=True) == sorted(ours, key=engine_priority)
    assert engine_priority(3.0) == -3
    assert -(2**31) < FIRST < engine_priority(1e12)
