"""Waiting for engines: what ends the wait, and what a failed start of one of them means."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.live.driver import capacity as under_test
from heddle_dask.live.driver.capacity import Patience, wait_for_capacity
from heddle_dask.live.wire.driver_messages import Capacity


def state(ready: int, failed: int, workers: int) -> Capacity:
    failures = {f"tcp://worker-{number}": "no such model" for number in range(failed)}
    engines: Any = tuple(object() for _ in range(ready))
    return Capacity(engines, 4, failures, (), workers + 1, workers, 1)


def waited(monkeypatch: pytest.MonkeyPatch, wanted: int | None, *states: Capacity) -> tuple[int, list[str]]:
    """Engines that are ready at the end of the wait, and the lines told; the last state stays."""
    told: list[str] = []
    left = list(states)

    async def answer(client: Any, request: Any) -> Capacity:
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(under_test, "ask_scheduler", answer)
    monkeypatch.setattr(under_test, "_POLL_S", 0.001)
    client: Any = None
    capacity = asyncio.run(wait_for_capacity(client, wanted, Patience(1.0, 1.0), told.append))
    return len(capacity.engines), told


def test_a_worker_whose_engine_does_not_start_leaves_the_run_to_the_others(monkeypatch) -> None:
    ready, told = waited(monkeypatch, None, state(0, 1, 3), state(1, 1, 3), state(2, 1, 3))
    assert ready == 2
    assert (
        told[-1]
        == "an engine does not start on worker tcp://worker-0: no such model; going on with 2 engines"
    )


def test_a_failed_start_is_no_reason_while_enough_others_may_answer(monkeypatch) -> None:
    ready, told = waited(monkeypatch, 2, state(0, 1, 3), state(1, 1, 3), state(2, 1, 3))
    assert (ready, told) == (2, ["0 of 2 engines ready", "1 of 2 engines ready"])


@pytest.mark.parametrize(("wanted", "failed"), [(3, 1), (None, 3), (1, 3)])
def test_too_few_engines_end_the_wait_with_the_reason(monkeypatch, wanted: int | None, failed: int) -> None:
    with pytest.raises(BadInput, match="an engine does not start on worker tcp://worker-0: no such model"):
        waited(monkeypatch, wanted, state(0, failed, 3))
