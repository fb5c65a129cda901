"""Plausible tokens: a function of seed and context, so that batching and interruption cannot show."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.engines.emulated.tokens import TokenSource

END = 257
contexts = st.lists(st.integers(0, 200_000), min_size=1, max_size=50)


def _draw(source: TokenSource, context, count, seed=1, ignore_eos=True, stops=()):
    return source.draw(context, count, seed=seed, ignore_eos=ignore_eos, stop_token_ids=stops)


@given(contexts, st.integers(0, 99), st.integers(0, 60))
def test_an_interrupted_step_goes_on_as_it_would_have(context, seed, cut):
    source = TokenSource(3, 30, END)
    tokens, logprobs, _ = _draw(source, context, 60, seed, ignore_eos=False)
    cut = min(cut, len(tokens) - 1)
    rest = _draw(source, [*context, *tokens[:cut]], 60 - cut, seed, ignore_eos=False)
    assert rest[0] == tokens[cut:]
    assert rest[1] == logprobs[cut:]


@given(contexts, st.integers(1, 80))
def test_tokens_are_printable_and_logprobs_negative(context, count):
    tokens, logprobs, stopped = _draw(TokenSource(0, 30, END), context, count)
    assert len(tokens) == len(logprobs) == count
    assert not stopped
    assert all(32 <= token < 127 for token in tokens)
    assert all(-20 < value < 0 for value in logprobs)


def test_seeds_engines_and_contexts_make_a_difference():
    draws = [
        tuple(_draw(TokenSource(engine, 30, END), context, 20, seed)[0])
        for engine in (0, 1)
        for context in ([1], [2])
        for seed in (-1, -2)  # an engine's own seeds
    ]
    assert len(set(draws)) == len(draws)
    seeded = [tuple(_draw(TokenSource(engine, 30, END), [1], 20, s)[0]) for s in (None, 1, 2) for engine in (0, 1)]
    assert len(set(seeded)) == 3, "a greedy step, and one with a seed, is the same on every engine"


def test_lengths_are_geometric_with_the_mean_asked_for():
    source = TokenSource(0, 50, END)
    draws = [_draw(source, [index], 10_000, index, ignore_eos=False) for index in range(1000)]
    lengths = [len(tokens) for tokens, _, _ in draws]
    assert all(tokens[-1] == END and stopped for tokens, _, stopped in draws)
    assert 45 < statistics.fmean(lengths) < 55
    assert 45 < statistics.pstdev(lengths) < 55


def test_stop_tokens_end_a_step_and_stand_in_for_the_end_token():
    source = TokenSource(0, 5, END)
    tokens, _, stopped = _draw(source, [1], 500, ignore_eos=False, stops=(300, 301))
    assert stopped
    assert tokens[-1] == 300
    free = _draw(source, [1], 5)[0]
    cut, _, stopped = _draw(TokenSource(0, 1e9, END), [1], 5, ignore_eos=False, stops=(free[2],))
    assert stopped
    assert cut == free[: free.index(free[2]) + 1]


def test_every_character_occurs():
    tokens = _draw(TokenSource(0, 50, END), [1], 20_000)[0]
    assert set(tokens) == set(range(32, 127))
