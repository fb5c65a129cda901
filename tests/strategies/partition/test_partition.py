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
from heddle_dask.strategies.partition.interference import worker_of
from heddle_dask.strategies.partition.makespan import partition_in_order
from heddle_dask.strategies.partition.presorted import presorted_dp, presorted_dp_by_bisection
from heddle_dask.strategies.partition.runs import Partition, Presorted, Worker
from heddle_dask.strategies.partition.unlike import partition_unlike

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
def test_equal_workers_all_three_algorithms_are_the_optimum(
    instance: tuple[list[float], Worker, int],
) -> None:
    lengths, worker, count = instance
    workers = [worker] * count
    best = brute_force(lengths, workers)
    packed = partition_in_order(Presorted(lengths), workers)
    assert packed is not None and packed.seconds == best
    assert_sound(packed, lengths, workers)
    if count <= len(lengths):  # Eq. 3 leaves no worker empty
        for algorithm in (presorted_dp, presorted_dp_by_bisection):
            partition = algorithm(lengths, worker.token_s, count)
            assert partition.seconds == best, algorithm.__name__
            assert_sound(partition, lengths, workers)
            assert 0 not in partition.sizes(count)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 8))
def test_the_three_algorithms_agree_on_larger_instances(seed: int, count: int, workers: int) -> None:
    rng = random.Random(seed)
    lengths = sorted((rng.paretovariate(1.1) for _ in range(count)), reverse=True)
    token_s = tuple(itertools.accumulate(rng.random() ** 3 for _ in range(count)))
    workers = min(workers, count)
    packed = partition_in_order(Presorted(lengths), [Worker(token_s)] * workers)
    assert packed is not None
    assert packed.seconds == presorted_dp(lengths, token_s, workers).seconds
    assert packed.seconds == presorted_dp_by_bisection(lengths, token_s, workers).seconds


@settings(deadline=None)
@given(unlike_instance())
def test_unlike_workers_the_best_order_is_the_optimum(instance: tuple[list[float], list[Worker]]) -> None:
    lengths, workers = instance
    best = brute_force(lengths, workers)
    partition = partition_unlike(Presorted(lengths), workers)
    if partition is None:
        assert best == math.inf
    else:
        assert partition.seconds == best
        assert_sound(partition, lengths, workers)


@settings(deadline=None)
@given(unlike_instance(), st.integers(1, 3))
def test_a_beam_is_sound_and_never_better_than_the_optimum(
    instance: tuple[list[float], list[Worker]], width: int
) -> None:
    lengths, workers = instance
    partition = partition_unlike(Presorted(lengths), workers, max_multisets=0, beam=width)
    if partition is not None:
        assert_sound(partition, lengths, workers)
        assert partition.seconds >= brute_force(lengths, workers)


def test_fastest_first_is_not_always_best() -> None:
    """The fast engine bears company best: the short ones belong there, and the long one alone on the slow engine."""
    fast, slow = Worker((1.0, 1.5, 9.0)), Worker((1.1, 5.0, 5.0))
    lengths = Presorted([10.0, 3.0, 3.0])
    fixed, best = partition_in_order(lengths, [fast, slow]), partition_unlike(lengths, [fast, slow])
    assert fixed is not None and fixed.seconds == 15.0
    assert best is not None and best.seconds == 11.0


# Worst gap that the docstring of `partition_unlike` allows for.
BEAM_WORST = 0.01


def random_unlike(seed: int, workers: int) -> tuple[Presorted, list[Worker]]:
    """A hard case: as many classes as workers, slowdowns of all shapes, no single trajectory that decides all."""
    rng = random.Random(seed)
    count = rng.randint(30, 120)
    spread = rng.choice((0.3, 0.8))
    lengths = sorted((rng.lognormvariate(0, spread) for _ in range(count)), reverse=True)
    made = []
    for _ in range(workers):
        power, scale = rng.choice((1, 3, 9)), rng.choice((0.1, 0.5, 2))
        steps = (scale * rng.random() ** power for _ in range(count))
        made.append(Worker(tuple(itertools.accumulate(steps, initial=rng.uniform(1, 8)))[:count]))
    return Presorted(lengths), made


def test_the_beam_is_near_the_exact_order() -> None:
    gaps = []
    for seed in range(60):
        lengths, workers = random_unlike(seed, 6 + seed % 3)
        exact = partition_unlike(lengths, workers)
        beam = partition_unlike(lengths, workers, max_multisets=0)
        assert exact is not None and beam is not None
        gaps.append(beam.seconds / exact.seconds - 1)
    assert min(gaps) >= 0
    assert max(gaps) <= BEAM_WORST


@st.composite
def kv_instance(draw: st.DrawFn) -> tuple[list[float], list[int], list[Worker]]:
    lengths = draw(
        st.lists(st.integers(1, 20), min_size=1, max_size=5).map(lambda v: sorted(v, reverse=True))
    )
    kv = draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    workers = [
        Worker(draw(table(len(lengths))), draw(st.integers(1, 25))) for _ in range(draw(st.integers(1, 3)))
    ]
    return list(map(float, lengths)), kv, workers


@settings(deadline=None)
@given(kv_instance())
def test_with_kv_capacities_it_is_the_best_contiguous_partition(
    instance: tuple[list[float], list[int], list[Worker]],
) -> None:
    lengths, kv, workers = instance
    best = math.inf
    for order in itertools.permutations(range(len(workers))):
        for cuts in itertools.combinations_with_replacement(range(len(lengths) + 1), len(workers) - 1):
            bounds = [0, *cuts, len(lengths)]
            seconds = 0.0
            for number, start, stop in zip(order, bounds, bounds[1:], strict=False):
                if sum(kv[start:stop]) > workers[number].capacity_tokens:
                    seconds = math.inf
                elif stop > start:
                    seconds = max(seconds, lengths[start] * workers[number].token_s[stop - start - 1])
            best = min(best, seconds)
    partition = partition_unlike(Presorted(lengths, kv), workers)
    assert (math.inf if partition is None else partition.seconds) == best
    if partition is not None:
        assert_sound(partition, lengths, workers)


def test_an_empty_batch_takes_no_time() -> None:
    for algorithm in (partition_in_order, partition_unlike):
        partition = algorithm(Presorted([]), [Worker((1.0,))])
        assert partition is not None and (partition.seconds, partition.runs) == (0.0, ())


def test_zero_lengths_are_no_division_by_zero() -> None:
    partition = partition_unlike(Presorted([3.0, 0.0, 0.0]), [Worker((1.0, 2.0, 3.0))] * 2)
    assert partition is not None and partition.seconds == 3.0


def test_bad_input_names_what_is_wrong() -> None:
    with pytest.raises(BadInput, match="descending"):
        Presorted([1.0, 2.0])
    with pytest.raises(BadInput, match="kv_tokens"):
        Presorted([2.0, 1.0], [3])
    with pytest.raises(BadInput, match="falls"):
        Worker((2.0, 1.0))
    with pytest.raises(BadInput, match="leaves no worker empty"):
        presorted_dp([1.0], (1.0,), 2)
    with pytest.raises(BadInput, match="needs all 2"):
        presorted_dp_by_bisection([2.0, 1.0], (1.0,), 1)


def test_interference_rises_with_the_batch_and_stretches_beyond_the_slots() -> None:
    cost = EngineCost(fixed_s=1.0, sequence_s=0.5, context_token_s=0.001, capacity_tokens=500)
    worker = worker_of(cost, 2, context_tokens=100, most=4)
    assert worker.token_s == pytest.approx((1.6, 2.2, 3.3, 4.4))
    assert worker.capacity_tokens == math.inf
    assert worker_of(cost, 2, context_tokens=100, most=4, protect_kv=True).capacity_tokens == 500
