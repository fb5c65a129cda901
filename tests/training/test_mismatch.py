"""Engines whose logprobs differ from the trainer's: told above 0.1 nats, ended above 1, at the first step already."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.training.mismatch import END_NATS, JUDGED_TOKENS, TOLD_NATS, EnginesDiffer, MismatchGuard


@given(st.lists(st.floats(0, 3), min_size=1, max_size=8))
def test_a_difference_is_told_when_it_is_new_or_has_doubled_and_ends_where_it_should(found: list[float]) -> None:
    tells, ends, told = MismatchGuard("tell"), MismatchGuard("end"), 0.0
    for step, nats in enumerate(found, 1):
        line = tells.judge(step, {"mismatch_mean": nats})
        assert bool(line) == (nats > max(TOLD_NATS, 2 * told)) and "\n" not in line
        told = nats if line else told
        if nats > END_NATS:
            with pytest.raises(EnginesDiffer, match=f"^step {step}: .*--mismatch tell goes on$"):
                ends.judge(step, {"mismatch_mean": nats})
            return
        assert ends.judge(step, {"mismatch_mean": nats}) == line


def test_a_few_fresh_tokens_end_a_training_at_its_first_step_only() -> None:
    few = {"mismatch_mean": 3.0, "fresh_tokens": JUDGED_TOKENS - 1.0}
    with pytest.raises(EnginesDiffer):
        MismatchGuard().judge(1, few)
    guard = MismatchGuard()
    assert guard.judge(1, {"mismatch_mean": 0.01}) == "" and "3 nats" in guard.judge(2, few)
    for odd in (few | {"fresh_tokens": float(JUDGED_TOKENS)}, {"mismatch_mean": math.nan}):
        with pytest.raises(EnginesDiffer):
            guard.judge(3, odd)


def test_a_step_without_fresh_tokens_says_nothing() -> None:
    assert MismatchGuard().judge(3, {"loss": 1.0, "logprob_difference_mean": 7.0}) == ""
