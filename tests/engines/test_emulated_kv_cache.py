"""The prefix cache: what is found, what is thrown out first, and that nothing is counted twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.engines.emulated.kv_cache import KvCache


def _hold(cache: KvCache, context: list[int]):
    held = cache.acquire(context, 0)
    assert held is not None
    return held


def test_a_repeated_context_is_found_in_whole_blocks_but_for_its_last_token():
    cache = KvCache(10_000)
    context = list(range(64))
    held = _hold(cache, context)
    assert held.cached_tokens == 0
    cache.release(held, context)
    assert cache.hit_tokens(context) == 48
    assert cache.hit_tokens([*context, 1]) == 64
    assert cache.hit_tokens([7, *context]) == 0


def test_sampled_tokens_are_found_by_a_continuation():
    cache = KvCache(10_000)
    context = list(range(20))
    held = _hold(cache, context)
    held.loose_tokens += 29
    cache.grow_all(29)
    cache.release(held, [*context, *range(100, 129)])
    assert cache.hit_tokens([*context, *range(100, 130)]) == 48


def test_shared_blocks_count_once():
    cache = KvCache(1000)
    context = list(range(160))
    first, second = _hold(cache, context), _hold(cache, context)
    assert cache.free_tokens == 1000 - 160
    assert second.cached_tokens == 144
    cache.release(first, context)
    assert cache.free_tokens == 1000 - 160
    cache.release(second, context)
    assert cache.free_tokens == 1000


def test_the_least_recently_used_goes_first_and_tails_before_heads():
    cache = KvCache(160)
    old, young = [1] * 65, [2] * 65
    for context in (old, young):
        cache.release(_hold(cache, context), context)
    held = _hold(cache, [3] * 48)
    assert cache.hit_tokens(young) == 64
    assert cache.hit_tokens(old) == 48
    cache.release(held, [3] * 48)


def test_what_does_not_fit_beside_those_running_is_not_taken():
    cache = KvCache(100)
    held = _hold(cache, [1] * 60)
    assert cache.acquire([2] * 41, 0) is None
    assert cache.acquire([2] * 40, 1) is None
    assert cache.acquire([1] * 48 + [2] * 40, 0) is not None
    cache.release(held, [1] * 60)


def test_a_broken_off_prefill_leaves_no_ghost():
    cache = KvCache(1000)
    context = list(range(160))
    cache.release(_hold(cache, context), context[:40])
    assert cache.hit_tokens(context) == 32


contexts = st.builds(
    lambda salt, shared, own: [0] * shared + [salt] * own,
    st.integers(1, 4),
    st.integers(0, 80),
    st.integers(1, 80),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(contexts, st.integers(0, 40), st.integers(0, 3)), max_size=40))
def test_counts_hold_in_any_order(plan):
    cache = KvCache(400)
    running: list[tuple] = []
    for context, sampled, releases in plan:
        held = cache.acquire(context, 0)
        if held is not None:
            grown = min(sampled, cache.free_tokens)
            held.loose_tokens += grown
            cache.grow_all(grown)
            running.append((held, [*context, *[9] * grown]))
        for _ in range(min(releases, len(running))):
            cache.release(*running.pop(0))
        assert 0 <= cache.free_tokens <= 400
        assert cache.resident_tokens <= 400
        assert set(cache._key) == set(cache._users) | set(cache._idle)
        assert len(cache._child) == len(cache._key)
    for held, context in running:
        cache.release(held, context)
    assert cache.free_tokens == 400
