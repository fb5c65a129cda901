"""Continuous batching in closed form: equal to going token by token, whatever comes when."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.cost.batching import ContinuousBatch
from heddle_dask.cost.engine_cost import EngineCost, fixed_cost
from heddle_dask.engines.emulated.kv_cache import KvCache, RoomForTokens
from heddle_dask.engines.emulated.kv_cache import TokenJob as Job

COST = EngineCost(
    fixed_s=4e-3,
    token_s=1e-4,
    prefill_token_s=2e-5,
    sequence_s=2e-4,
    context_token_s=1e-6,
    chunk_tokens=64,
)

WHOLE = replace(COST, chunk_tokens=310, prompt_s=7e-3, block_tokens=32, whole_prompts=True)


class OneByOne(ContinuousBatch):
    """The reference: every iteration for itself."""

    def _run_length(self) -> tuple[int, int]:
        count, chunk = ContinuousBatch._run_length(self)
        return min(count, 1), chunk


def _job(prompt: int, length: int, *, salt: int = 0, priority: int = 0) -> Job:
    sampled = [salt + 1000] * length
    return Job(prompt, length, priority, prompt=[salt] * prompt, tokens=lambda count: sampled[:count])


jobs = st.tuples(
    st.floats(0, 2),  # arrival
    st.integers(1, 300),  # prompt
    st.integers(1, 120),  # length
    st.integers(-2, 2),  # priority
    st.integers(0, 3),  # salt: shared prefixes
    st.none() | st.floats(0, 2),  # aborted so long after arrival
)


def _play(
    kind: type[ContinuousBatch], plan: list[tuple], slots: int, capacity: int, cost: EngineCost = COST
) -> list[Job]:
    batch = kind(cost, slots, RoomForTokens(KvCache(capacity, cost.block_tokens)))
    events: list[tuple[float, int, str, Job]] = []
    made = []
    for index, (arrival, prompt, length, priority, salt, abort) in enumerate(plan):
        job = _job(prompt, length, salt=salt, priority=priority)
        made.append(job)
        events.append((arrival, 2 * index, "submit", job))
        if abort is not None:
            events.append((arrival + abort, 2 * index + 1, "abort", job))
    ended = []
    for now_s, _, what, job in sorted(events, key=lambda event: event[:2]):
        while batch.next_s <= now_s:
            ended += batch.advance(batch.next_s)
        ended += batch.submit(job, now_s) if what == "submit" else batch.abort(job, now_s)
    while batch.next_s < math.inf:
        ended += batch.advance(batch.next_s)
    assert sorted(map(id, ended)) == sorted(map(id, made)), "each job ends once"
    assert batch.running == batch.waiting == 0
    assert batch._context_tokens == 0
    assert batch.kv_cache.free_tokens == capacity, "all KV was given back"
    return made


@settings(max_examples=150, deadline=None)
@given(
    st.lists(jobs, min_size=1, max_size=12),
    st.integers(1, 5),
    st.sampled_from([450, 900, 100_000]),
    st.sampled_from([COST, WHOLE, replace(COST, per_prompt_s=0.02)]),
)
def test_jumping_equals_going_token_by_token(plan, slots, capacity, cost):
    jumped = _play(ContinuousBatch, plan, slots, capacity, cost)
    walked = _play(OneByOne, plan, slots, capacity, cost)
    for one, other in zip(jumped, walked, strict=True):
        assert one.ended_s == pytest.approx(other.ended_s, abs=1e-6)
        assert one.aborted == other.aborted
        # At the very instant of an iteration's end the last bit decides which side an abort is on.
        assert abs(one.generated - other.generated) <= 1
        if not one.aborted:
            assert one.generated == one.length
            assert one.submitted_s <= one.admitted_s <= one.first_token_s <= one.ended_s + 1e-9


def test_a_job_alone_takes_what_the_cost_model_says():
    batch = ContinuousBatch(COST, 4, RoomForTokens(KvCache(10_000)))
    job = _job(200, 50)
    assert batch.submit(job, 5.0) == []
    assert batch.advance(100.0) == [job]
    assert job.admitted_s == 5.0
    assert job.first_token_s - 5.0 == pytest.approx(COST.prefill_s(200))
    assert job.ended_s - job.first_token_s == pytest.approx(COST.span_s(49, 1, 200))


def test_prompts_that_join_together_take_their_own_time_one_after_another():
    def first_tokens_s(cost: EngineCost) -> list[float]:
        batch = ContinuousBatch(cost, 4, RoomForTokens(KvCache(10_000)))
        made = [_job(100, 5, salt=index) for index in range(3)]
        for job in made:
            batch.submit(job, 5.0)
        batch.advance(100.0)
        return [job.first_token_s for job in made]

    later_s = [seconds + 3 * 0.5 for seconds in first_tokens_s(COST)]
    assert first_tokens_s(replace(COST, per_prompt_s=0.5)) == pytest.approx(later_s)


class Watched(OneByOne):
    """Looks into every iteration: what it holds, and whether each prompt in it ends with it."""

    def _run(self, count: int, chunk: int, seconds: float) -> None:
        if count:
            assert chunk + len(self._decoding) <= self.cost.chunk_tokens
            assert chunk == sum(job.prefill_tokens for job in self._prefilling)
            prompt_s = self.cost.prompt_s if chunk else 0.0
            bare = replace(self.cost, prompt_s=0.0)
            expected = bare.iteration_s(len(self._decoding), self._context_tokens, chunk) + prompt_s
            assert seconds == pytest.approx(expected)
        super()._run(count, chunk, seconds)


@settings(max_examples=100, deadline=None)
@given(st.lists(jobs, min_size=1, max_size=12), st.integers(1, 5))
def test_whole_prompts_share_an_iteration_only_if_all_of_them_fit(plan, slots):
    _play(Watched, plan, slots, 100_000, WHOLE)


def test_a_prompt_that_does_not_fit_whole_waits_for_the_next_iteration():
    batch = ContinuousBatch(WHOLE, 4, RoomForTokens(KvCache(10_000, 32)))
    first, second, third = (_job(length, 5, salt=length) for length in (200, 150, 10))
    for job in (first, second, third):
        batch.submit(job, 0.0)
    batch.advance(100.0)
    # The third one stays behind the second, as it does in vLLM.
    assert first.admitted_s == 0.0
    assert first.first_token_s == second.admitted_s == third.admitted_s == pytest.approx(WHOLE.prefill_s(200))
    cut = ContinuousBatch(replace(WHOLE, whole_prompts=False), 4, RoomForTokens(KvCache(10_000, 32)))
    jobs = [_job(length, 5, salt=length) for length in (200, 150, 10)]
    for job in jobs:
        cut.submit(job, 0.0)
    assert {job.admitted_s for job in jobs} == {0.0}


def test_fixed_cost_jobs_do_not_slow_each_other():
    batch = ContinuousBatch(fixed_cost(0.01), 400, RoomForTokens(KvCache(10**7)))
    made = [_job(1000, 100, salt=index) for index in range(400)]
    for job in made:
        batch.submit(job, 0.0)
    batch.advance(10.0)
    assert {round(job.ended_s, 6) for job in made} <= {1.0, 1.01}


def test_a_step_of_no_length_ends_on_arrival():
    batch = ContinuousBatch(fixed_cost(0.0), 2, RoomForTokens(KvCache(10_000)))
    made = [_job(10, 5, salt=index) for index in range(5)]
    assert [batch.submit(job, 1.0) for job in made] == [[job] for job in made]
    assert batch.next_s == math.inf


def test_smaller_priority_is_admitted_first_then_order_of_arrival():
    batch = ContinuousBatch(fixed_cost(0.01), 1, RoomForTokens(KvCache(10_000)))
    plan = [("holder", 0), ("b", 5), ("c", 5), ("a", -5)]
    made = {}
    for index, (name, priority) in enumerate(plan):
        made[name] = _job(5, 10, salt=index, priority=priority)
        batch.submit(made[name], 0.001 * index)
    ended = batch.advance(10.0)
    assert ended == [made[name] for name in ("holder", "a", "b", "c")]


def test_when_kv_runs_out_the_least_urgent_goes_back_and_still_ends():
    batch = ContinuousBatch(fixed_cost(0.01), 4, RoomForTokens(KvCache(320)))
    urgent = _job(100, 150, salt=1, priority=0)
    lazy = _job(100, 150, salt=2, priority=1)
    batch.submit(urgent, 0.0)
    batch.submit(lazy, 0.0)
    batch.advance(100.0)
    assert (urgent.preemptions, lazy.preemptions) == (0, 1)
    assert urgent.generated == lazy.generated == 150
    assert urgent.ended_s < lazy.ended_s


def test_an_abort_keeps_the_tokens_whose_time_has_come():
    batch = ContinuousBatch(fixed_cost(0.01), 4, RoomForTokens(KvCache(10_000)))
    job, queued = _job(10, 1000), _job(10, 5, salt=1)
    batch.submit(job, 0.0)
    assert batch.abort(job, 0.355) == [job]
    assert (job.generated, job.aborted, job.ended_s) == (35, True, 0.355)
    batch.slots = 0
    batch.submit(queued, 0.4)
    assert batch.abort(queued, 0.5) == [queued]
    assert queued.generated == 0
    assert batch.abort(queued, 0.6) == []
