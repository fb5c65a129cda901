"""Eq. 2 and 3: every algorithm against all partitions of small instances."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.partition.runs import Partition, Presorted, Worker, partition_in_order, worker_of

lengths_of = st.lists(st.one_of(st.integers(1, 9), st.floats(0.5, 1e5)), min_size=1, max_size=6).map(
    lambda values: sorted(values, reverse=True)
)


@st.composite
def table(draw: st.DrawFn, size: int) -> tuple[float, ...]:
    """T·F of groups of 1 … size, with plateaus and jumps."""
    steps = draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 7.0]), min_size=size, max_size=size))
    return tuple(itertools.accumulate(steps, initial=draw(st.floats(0.01, 3.0))))[:size]


@st.composite
def equal_instance(draw: st.DrawFn) -> tuple[list[float], Worker, int]:
    lengths = draw(lengths_of)
    return lengths, Worker(draw(table(len(lengths)))), draw(st.integers(1, 3))


@st.composite
def unlike_instance(draw: st.DrawFn) -> tuple[list[float], list[Worker]]:
    lengths = draw(lengths_of)
    classes = draw(st.lists(table(draw(st.integers(1, len(lengths)))), min_size=1, max_size=3))
    picks = draw(st.lists(st.integers(0, len(classes) - 1), min_size=1, max_size=3))
    return lengths, [Worker(classes[i]) for i in picks]


def brute_force(lengths: Sequence[float], workers: Sequence[Worker]) -> float:
    """Eq. 2 over every assignment, contiguous or not; infinite when none fits the tables."""
    best = math.inf
    for assignment in itertools.product(range(len(workers)), repeat=len(lengths)):
        seconds = 0.0
        for number, worker in enumerate(workers):
            members = [x for x, own in zip(lengths, assignment, strict=True) if own == number]
            if len(members) > len(worker.token_s):
                seconds = math.inf
            elif members:
                seconds = max(seconds, members[0] * worker.token_s[len(members) - 1])
        best = min(best, seconds)
    return best


def presorted_dp_s(lengths: Sequence[float], token_s: Sequence[float], workers: int) -> float:
    """Eq. 3 of Heddle as printed: ``dp[i][j] = min_k max(dp[k][j-1], L(k+1) T F(i-k))``, no worker empty."""
    before = [0.0] + [lengths[0] * token_s[i] for i in range(len(lengths))]
    for j in range(2, workers + 1):
        row = [math.inf] * (len(lengths) + 1)
        for i in range(j, len(lengths) + 1):
            row[i] = min(max(before[k], lengths[k] * token_s[i - k - 1]) for k in range(j - 1, i))
        before = row
    return before[-1]


def assert_sound(partition: Partition, lengths: Sequence[float], workers: Sequence[Worker]) -> None:
    """The runs cover every trajectory once, no worker has two, and the makespan is theirs."""
    covered = [i for run in partition.runs for i in range(run.start, run.stop)]
    assert covered == list(range(len(lengths)))
    numbers = [run.worker for run in partition.runs]
    assert len(dict.fromkeys(numbers)) == len(numbers)
    ends = [lengths[r.start] * workers[r.worker].token_s[r.stop - r.start - 1] for r in partition.runs]
    assert partition.seconds == max(ends)
    assert sum(partition.sizes(len(workers))) == len(lengths)


@settings(deadline=None)
@given(equal_instance())
def test_equal_workers_eq_3_and_the_search_for_the_makespan_are_the_optimum(
    instance: tuple[list[float], Worker, int],
) -> None:
    lengths, worker, count = instance
    workers = [worker] * count
    best = brute_force(lengths, workers)
    packed = partition_in_order(Presorted(lengths), workers)
    assert packed is not None and packed.seconds == best
    assert_sound(packed, lengths, workers)
    if count <= len(lengths):  # Eq. 3 leaves no worker empty
        assert presorted_dp_s(lengths, worker.token_s, count) == best


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 8))
def test_the_search_for_the_makespan_agrees_with_eq_3_on_larger_instances(seed: int, count: int, workers: int) -> None:
    rng = random.Random(seed)
    lengths = sorted((rng.paretovariate(1.1) for _ in range(count)), reverse=True)
    token_s = tuple(itertools.accumulate(rng.random() ** 3 for _ in range(count)))
    workers = min(workers, count)
    packed = partition_in_order(Presorted(lengths), [Worker(token_s)] * workers)
    assert packed is not None
    assert packed.seconds == presorted_dp_s(lengths, token_s, workers)


@settings(deadline=None)
@given(unlike_instance())
def test_heterogeneous_workers_in_order_get_the_best_contiguous_runs(
    instance: tuple[list[float], list[Worker]],
) -> None:
    lengths, workers = instance
    best = math.inf
    for cuts in itertools.combinations_with_replacement(range(len(lengths) + 1), len(workers) - 1):
        bounds = [0, *cuts, len(lengths)]
        seconds = 0.0
        for worker, start, stop in zip(workers, bounds, bounds[1:], strict=False):
            if stop - start > len(worker.token_s):
                seconds = math.inf
            elif stop > start:
                seconds = max(seconds, lengths[start] * worker.token_s[stop - start - 1])
        best = min(best, seconds)
    partition = partition_in_order(Presorted(lengths), workers)
    assert (math.inf if partition is None else partition.seconds) == best
    if partition is not None:
        assert_sound(partition, lengths, workers)


def test_an_empty_batch_takes_no_time() -> None:
    partition = partition_in_order(Presorted([]), [Worker((1.0,))])
    assert partition is not None and (partition.seconds, partition.runs) == (0.0, ())


def test_zero_lengths_are_no_division_by_zero() -> None:
    partition = partition_in_order(Presorted([3.0, 0.0, 0.0]), [Worker((1.0, 2.0, 3.0))] * 2)
    assert partition is not None and partition.seconds == 3.0


def test_bad_input_names_what_is_wrong() -> None:
    with pytest.raises(BadInput, match="descending"):
        Presorted([1.0, 2.0])
    with pytest.raises(BadInput, match="falls"):
        Worker((2.0, 1.0))


def test_interference_rises_with_the_batch_and_stretches_beyond_the_slots() -> None:
    cost = EngineCost(fixed_s=1.0, sequence_s=0.5, context_token_s=0.001, capacity_tokens=500)
    worker = worker_of(cost, 2, context_tokens=100, most=4)
    assert worker.token_s == pytest.approx((1.6, 2.2, 3.3, 4.4))
