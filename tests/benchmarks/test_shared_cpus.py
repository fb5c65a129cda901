"""A node that is shared by containers, against hand-computed cases and a simulation without classes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.nouns import DurationProfile
from heddle_dask.core.resources import IDLE_NICE
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.shared_cpus import SharedJob, SharedNode, fair_level

Job = tuple[float, float, float, float]
"""Arrival, limit, CPU seconds, serial share."""


def ends_on(cpus: int, jobs: list[Job]) -> list[float]:
    """When each job ends on a shared node."""
    time = VirtualTime()
    node = SharedNode(cpus, time)
    ends = [math.nan] * len(jobs)

    def ended(number: int) -> None:
        ends[number] = time.now_s

    for number, (arrival_s, cap, work_s, serial) in enumerate(jobs):
        job = SharedJob(cap, DurationProfile(work_s, serial), ended, (number,))
        time.at(arrival_s, node.add, job)
    time.run()
    assert node.jobs == 0
    return ends


def speed(cpus: float, serial: float) -> float:
    return cpus if cpus < 1 else 1 / (serial + (1 - serial) / cpus)


def slow_ends(cpus: int, jobs: list[Job]) -> list[float]:
    """The same, job by job: what is left of each, and the shares by repeated equal division."""
    left = [work for _, _, work, _ in jobs]
    ends = [math.nan] * len(jobs)
    now = 0.0
    while any(math.isnan(end) for end in ends):
        running = [n for n, job in enumerate(jobs) if job[0] <= now + 1e-12 and math.isnan(ends[n])]
        share = dict.fromkeys(running, 0.0)
        open_jobs, free = set(running), float(cpus)
        while open_jobs and free > 1e-12:
            part = free / len(open_jobs)
            for n in sorted(open_jobs):
                taken = min(part, jobs[n][1] - share[n])
                share[n] += taken
                free -= taken
            open_jobs = {n for n in open_jobs if share[n] < jobs[n][1] - 1e-12}
        speeds = {n: speed(share[n], jobs[n][3]) for n in running}
        steps = [left[n] / speeds[n] for n in running] + [job[0] - now for job in jobs if job[0] > now + 1e-12]
        step = min(steps)
        now += step
        for n in running:
            left[n] -= step * speeds[n]
            if left[n] <= 1e-9:
                ends[n] = now
    return ends


def test_one_leaves_its_share_to_the_other() -> None:
    # Two CPUs: one each for a second, then both for the 7 s of work that are left.
    assert ends_on(2, [(0.0, 4.0, 8.0, 0.0), (0.0, 1.0, 1.0, 1.0)]) == pytest.approx([4.5, 1.0])


def test_a_limit_leaves_cpus_free() -> None:
    assert ends_on(8, [(0.0, 2.0, 8.0, 0.0)]) == pytest.approx([4.0])


def test_more_jobs_than_cpus_run_slower() -> None:
    assert ends_on(1, [(0.0, 1.0, 1.0, 1.0), (0.0, 1.0, 1.0, 1.0)]) == pytest.approx([2.0, 2.0])


def test_a_removed_job_frees_its_share_and_does_not_report() -> None:
    time = VirtualTime()
    node = SharedNode(1, time)
    ends: list[tuple[str, float]] = []

    def ended(name: str) -> None:
        ends.append((name, time.now_s))

    jobs = {name: SharedJob(1.0, DurationProfile(2.0, 1.0), ended, (name,)) for name in "ab"}
    for job in jobs.values():
        node.add(job)
    time.at(1.0, node.remove, jobs["a"])
    time.run()
    assert ends == [("b", pytest.approx(2.5))] and jobs["a"].over and node.jobs == 0


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 1.0, 2.25]),
            st.sampled_from([0.5, 1.0, 2.0, 4.0]),
            st.sampled_from([0.1, 1.0, 3.0]),
            st.sampled_from([0.0, 0.25, 1.0]),
        ),
        min_size=1,
        max_size=8,
    ),
)
@settings(max_examples=150, deadline=None)
def test_shares_as_job_by_job(cpus: int, jobs: list[Job]) -> None:
    assert ends_on(cpus, jobs) == pytest.approx(slow_ends(cpus, jobs), abs=1e-6)


@given(
    st.integers(1, 64),
    st.lists(
        st.tuples(st.sampled_from([0.5, 1.0, 4.0, 32.0]), st.sampled_from([3.0, 15.0, 335.0]), st.integers(1, 40)),
        min_size=1,
        max_size=4,
    ),
)
def test_no_cpu_is_given_twice_and_none_is_left_that_a_job_could_use(
    cpus: int, demands: list[tuple[float, float, int]]
) -> None:
    level = fair_level(cpus, demands)
    given = sum(min(cap, level * weight) * number for cap, weight, number in demands)
    wanted = sum(cap * number for cap, _, number in demands)
    assert given == pytest.approx(min(wanted, cpus))


def test_a_short_job_goes_first_and_who_has_a_cpu_alone_loses_what_the_kernel_gives_away() -> None:
    """Nice 5 weighs 335 and the idle class 3, beside the 1,024 of a usual process: sched_prio_to_weight of Linux."""
    time, ends = VirtualTime(), {}
    node = SharedNode(2, time)
    node.take(1)
    for name, nice in (("short", 5), ("long", IDLE_NICE)):
        node.add(SharedJob(8.0, DurationProfile(10.0), lambda name: ends.update({name: time.now_s}), (name,), nice))
    time.run()
    cpus = (335.5 / 338.5) + 335.5 / (1024 + 338.5)
    assert ends["short"] == pytest.approx(10.0 / cpus, rel=1e-3)
    assert ends["long"] == pytest.approx(10.0 / cpus + (10.0 - 10.0 * 3 / 335.5) / (1 + 3 / 1027), rel=1e-3)
    lost_s = ends["short"] * 338.5 / (1024 + 338.5) + (ends["long"] - ends["short"]) * 3 / 1027
    assert node.lost_s == pytest.approx(lost_s, rel=1e-3)
