"""Waiting for engines: what ends the wait, and what a failed start of one of them means."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver.connection import capacity as under_test
from heddle_dask.live.driver.connection.capacity import missing_workers, wait_for_capacity
from heddle_dask.live.driver.options import Patience
from heddle_dask.live.wire.cluster_messages import QueuedCapacity
from heddle_dask.live.wire.driver_messages import Capacity


def state(ready: int, failed: int, workers: int) -> Capacity:
    failures = {f"tcp://worker-{number}": "no such model" for number in range(failed)}
    engines: Any = tuple(object() for _ in range(ready))
    return Capacity(engines, 4, failures, (), workers + 1, workers, 1)


def waited(
    monkeypatch: pytest.MonkeyPatch,
    wanted: int | None,
    *states: Capacity,
    patience_s: float = 1.0,
    others_s: float = math.inf,
) -> tuple[int, list[str]]:
    """Engines that are ready at the end of the wait, and the lines told; the last state stays."""
    told: list[str] = []
    left = list(states)

    async def answer(client: Any, request: Any) -> Capacity:
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(under_test, "ask_scheduler", answer)
    monkeypatch.setattr(under_test, "_POLL_S", 0.001)
    client: Any = None
    patience = Patience(patience_s, patience_s)
    capacity = asyncio.run(wait_for_capacity(client, wanted, patience, told.append, others_s=others_s))
    return len(capacity.engines), told


def test_a_worker_whose_engine_does_not_start_leaves_the_run_to_the_others(monkeypatch) -> None:
    ready, told = waited(monkeypatch, None, state(0, 1, 3), state(1, 1, 3), state(2, 1, 3))
    assert ready == 2
    assert told[-1] == "an engine does not start on worker tcp://worker-0: no such model; going on with 2 engines"


def test_a_failed_start_is_no_reason_while_enough_others_may_answer(monkeypatch) -> None:
    ready, told = waited(monkeypatch, 2, state(0, 1, 3), state(1, 1, 3), state(2, 1, 3))
    assert (ready, told) == (2, ["0 of 2 engines ready", "1 of 2 engines ready"])


def test_the_wait_says_what_engines_are_doing_and_ends_with_the_first_that_answers(monkeypatch) -> None:
    compile, load = "compiling", "loading weights"
    ready, told = waited(
        monkeypatch,
        3,
        replace(state(0, 0, 3), starting=(compile, load, load)),
        replace(state(0, 0, 3), starting=(compile,)),
        replace(state(1, 0, 3), starting=(compile, compile)),
        others_s=0.05,
    )
    assert (ready, told) == (
        1,
        [
            "0 of 3 engines ready (1 compiling, 2 loading weights)",
            "0 of 3 engines ready (compiling)",
            "1 of 3 engines ready (2 compiling)",
            "beginning with 1 of 3 engines; the others join when they answer",
        ],
    )


@pytest.mark.parametrize(("wanted", "failed"), [(3, 1), (None, 3), (1, 3)])
def test_too_few_engines_end_the_wait_with_the_reason(monkeypatch, wanted: int | None, failed: int) -> None:
    with pytest.raises(BadInput, match="an engine does not start on worker tcp://worker-0: no such model"):
        waited(monkeypatch, wanted, state(0, failed, 3))


def queued(state: Capacity, **values: Any) -> Capacity:
    return replace(state, queued=QueuedCapacity(**values))


def test_workers_in_queued_and_starting_jobs_are_waited_for_without_limit(monkeypatch) -> None:
    nobody = Capacity((), 0, {}, (), 0, 0, 0)
    waits = [queued(nobody, engines=2, tool_workers=1, engines_to_begin=1)] * 1500
    starts = [queued(nobody, starting_engines=2, starting_tool_workers=1, engines_to_begin=1)] * 1500
    there = queued(state(1, 0, 3), starting_engines=1, engines_to_begin=1)
    ready, told = waited(monkeypatch, None, *waits, *starts, there, patience_s=0.5)
    assert ready == 1
    assert told[:2] == [
        "0 of 1 rollout workers are there; 2 in jobs that queue; no tool worker is there; 1 in jobs that queue",
        "0 of 1 rollout workers are there; 2 in jobs that start; no tool worker is there; 1 in jobs that start",
    ]


def test_a_run_begins_with_the_minimum_of_the_groups(monkeypatch) -> None:
    growing = [queued(state(ready, 0, 1 + ready), engines=4 - ready, engines_to_begin=2) for ready in range(3)]
    assert waited(monkeypatch, None, *growing)[0] == 2
    assert waited(monkeypatch, 3, *growing, state(3, 0, 3))[0] == 3


def test_jobs_that_all_fail_end_the_wait_with_the_reason(monkeypatch) -> None:
    nobody = queued(Capacity((), 0, {}, (), 0, 0, 0), engines_to_begin=1, trouble="gpu-3: it was cancelled")
    with pytest.raises(BadInput, match="latest failed job: gpu-3: it was cancelled; waited"):
        waited(monkeypatch, None, nobody, patience_s=0.1)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_advice_fits_who_starts_the_workers(workers: int) -> None:
    """A person, or the jobs of a cluster object."""
    lacks = Capacity((), 0, {}, (), workers, workers, 0)
    by_hand, by_jobs = missing_workers(lacks, None), missing_workers(queued(lacks, engines_to_begin=1), None)
    assert by_hand.endswith(f"start workers with --resources {('ENGINE=1', 'TOOL=<cpus>')[workers]}")
    assert f"a group with role = {('rollout', 'tool')[workers]!r}" in by_jobs and "--resources" not in by_jobs


def test_it_is_told_where_the_engines_are_that_will_come() -> None:
    delayed = QueuedCapacity(engines_to_begin=1, next_job_s=96.2)
    assert delayed.engines_told == "next job in 96 s"
    assert replace(delayed, engines=1, starting_engines=2).engines_told == "1 in jobs that queue, 2 in jobs that start"
    assert QueuedCapacity().engines_told == ""
