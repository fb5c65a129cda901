"""The counted prefix cache: the same numbers as the cache that knows every token, whatever comes when."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.cost.iteration import BLOCK_TOKENS
from heddle_dask.engines.emulated.kv_cache import KvCache
from heddle_dask.sim.kv_cache import CountedKvCache, SimulatedJob

PROMPTS = (5, 40, 64, 100)  # by group: less than a block, in between, whole blocks
GROUP_SIZE = 3


class Both:
    """A counted cache and an exact one, side by side, and the trajectories that use them."""

    def __init__(self, capacity: int, block_tokens: int = BLOCK_TOKENS) -> None:
        self.counted = CountedKvCache(capacity, block_tokens)
        self.exact = KvCache(capacity, block_tokens)
        self.contexts = [[group + 1] * PROMPTS[group] for group in range(len(PROMPTS)) for _ in range(GROUP_SIZE)]
        self.open: dict[int, list] = {}  # trajectory: job, held, exact held, tokens grown

    def job(self, index: int) -> SimulatedJob:
        group = index // GROUP_SIZE
        return SimulatedJob(
            prompt_tokens=len(self.contexts[index]),
            length=1,
            trajectory_id=f"t{index}",
            group_id=f"g{group}",
            shared_tokens=PROMPTS[group],
        )

    def take(self, index: int, spare: int) -> None:
        job, context = self.job(index), self.contexts[index]
        assert self.counted.hit_tokens(job) == self.exact.hit_tokens(context)
        held, exact = self.counted.take(job, spare), self.exact.acquire(context, spare)
        assert (held is None) == (exact is None)
        if held is not None and exact is not None:
            assert held.cached_tokens == exact.cached_tokens
            self.open[index] = [job, held, exact, 0]

    def grow(self, tokens: int) -> None:
        """Each running job by so many tokens, as far as all fit."""
        each = min(tokens, self.counted.free_tokens // max(1, len(self.open)))
        self.counted.grow_all(each * len(self.open))
        self.exact.grow_all(each * len(self.open))
        for running in self.open.values():
            running[3] += each

    def give_back(self, index: int, computed_share: float) -> None:
        job, held, exact, grown = self.open.pop(index)
        context = self.contexts[index]
        if grown:  # it decoded: only the token sampled last has no KV
            context += [100 + index] * grown
            computed = len(context) - 1
        else:  # its prefill was broken off somewhere behind what was cached
            computed = held.cached_tokens + int(computed_share * (len(context) - held.cached_tokens))
        job.generated = grown
        held.loose_tokens += grown
        exact.loose_tokens += grown
        self.counted.give_back(job, held, computed)
        self.exact.release(exact, context[:computed])

    def check(self) -> None:
        assert self.counted.free_tokens == self.exact.free_tokens
        assert 0 <= self.counted._used_tokens <= self.counted.capacity_tokens
        resident = self.counted._used_tokens + self.counted._idle_tokens
        assert resident == self.exact.resident_tokens <= self.counted.capacity_tokens
        assert sum(self.counted._idle.values()) == self.counted._idle_tokens
        for index, context in enumerate(self.contexts):
            if index not in self.open:
                assert self.counted.hit_tokens(self.job(index)) == self.exact.hit_tokens(context), index


trajectories = st.integers(0, len(PROMPTS) * GROUP_SIZE - 1)
moments = st.one_of(
    st.tuples(st.just("take"), trajectories, st.integers(0, 20)),
    st.tuples(st.just("grow"), st.integers(1, 90), st.just(0)),
    st.tuples(st.just("give back"), trajectories, st.floats(0, 1)),
    st.tuples(st.just("observe"), trajectories, st.integers(1, 60)),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(moments, max_size=80),
    st.sampled_from([320, 700, 1500, 100_000]),
    st.sampled_from([BLOCK_TOKENS, 32, 128]),
)
def test_counts_and_hits_are_those_of_the_cache_that_knows_the_tokens(plan, capacity, block_tokens):
    both = Both(capacity, block_tokens)
    for what, number, more in plan:
        if what == "grow":
            both.grow(number)
        elif what == "take" and number not in both.open:
            both.take(number, more)
        elif what == "give back" and number in both.open:
            both.give_back(number, more)
        elif what == "observe" and number not in both.open:
            both.contexts[number] += [200 + number] * more
        both.check()
    for index in list(both.open):
        both.give_back(index, 1.0)
        both.check()
    assert both.counted.free_tokens == capacity, "all KV was given back"


def test_a_context_inserted_from_elsewhere_is_found_by_its_next_step():
    both = Both(1000)
    job = both.job(11)
    assert both.counted.insert(job, 0)
    assert both.counted.hit_tokens(job) == 6 * BLOCK_TOKENS
    assert both.counted.free_tokens == 1000


def test_a_context_that_does_not_fit_is_not_inserted_and_nothing_is_taken():
    both = Both(150)
    both.take(9, 0)
    assert both.counted.free_tokens == 50
    assert not both.counted.insert(both.job(8), 1)
    assert both.counted.free_tokens == 50
    assert both.counted.hit_tokens(both.job(8)) == 0


def test_of_a_broken_off_prefill_only_what_was_computed_is_found():
    both = Both(1000)
    both.take(9, 0)
    both.give_back(9, 0.4)
    assert both.counted.hit_tokens(both.job(10)) == 32


def test_an_export_stays_in_use_until_it_is_read():
    both = Both(1000)
    job = both.job(11)
    job.pins_kv = True
    held = both.counted.take(job, 0)
    assert held is not None
    job.generated = job.length
    both.counted.give_back(job, held, job.prompt_tokens)
    assert both.counted.free_tokens < 1000 and job.pinned is held
    both.counted.unpin(job, job.prompt_tokens)
    assert both.counted.free_tokens == 1000
    assert both.counted.hit_tokens(both.job(11)) == 6 * BLOCK_TOKENS
