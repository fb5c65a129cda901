"""Failing environments: back-off, quarantine, and rewards where one attempt in ten fails, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from selectors import DefaultSelector
from typing import Any

import pytest

from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.environments.base import EnvironmentFailed, environment_step
from heddle_dask.live.driver.runs.endings import EnvironmentFailures, ending_of

T = ("e", "t")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps take no time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        selector = DefaultSelector()
        wait = selector.select

        def select(timeout: float | None = None) -> Any:
            self.now_s += timeout or 0.0
            return wait(0)

        selector.select = select  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


def run_virtually(coroutine: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def test_back_off_doubles_up_to_a_bound() -> None:
    failures = EnvironmentFailures(RetryPolicy(environment_backoff_s=2))
    assert [failures.backoff_s(n) for n in (1, 2, 3, 7, 50)] == [2.0, 4.0, 8.0, 128.0, 128.0]


def test_a_task_is_quarantined_after_failures_in_a_row() -> None:
    told: list[str] = []
    failures = EnvironmentFailures(RetryPolicy(max_task_failures=3, max_environment_attempts=9), told.append)
    assert failures.failed(T, 1, "gone") and failures.failed(T, 2, "gone")
    failures.succeeded(T)
    assert failures.failed(T, 3, "gone") and failures.failed(T, 4, "gone")
    assert not failures.failed(T, 5, "gone")
    assert failures.quarantined == {T: "gone"} and failures.count == 5
    assert told == ["task t is quarantined: its environment failed 3 times: gone"]
    assert failures.failed(("other", "t"), 1, "gone"), "tasks of others go on"


def test_a_trajectory_is_given_up_after_its_attempts() -> None:
    failures = EnvironmentFailures(RetryPolicy(max_environment_attempts=2, max_task_failures=99))
    assert failures.failed(T, 1, "gone") and not failures.failed(T, 2, "gone")
    assert not failures.quarantined


@pytest.mark.parametrize("tail", ["normal", "heavy"])
def test_one_in_ten_environments_fails_and_resets_take_minutes(tail: str) -> None:
    """Every attempt that ends has a reward of an environment that worked; no failure has one."""
    draw = random.Random(f"failing {tail}")

    async def episode() -> float:
        with environment_step("reset"):
            async with asyncio.timeout(300):
                await asyncio.sleep(draw.uniform(60, 240) if draw.random() > 0.05 else 10_000)
        for _ in range(5):
            with environment_step("step"):
                if draw.random() < 0.1 / 5:
                    raise ConnectionResetError("gone")
                took_s = draw.gauss(10, 2) if tail == "normal" else draw.paretovariate(1.2)
                async with asyncio.timeout(300):
                    await asyncio.sleep(max(0.0, took_s))
        return 1.0

    async def attempts() -> list[float | None]:
        failures = EnvironmentFailures(RetryPolicy(max_environment_attempts=10, max_task_failures=10))
        rewards: list[float | None] = []
        for number in range(200):
            attempt = 0
            while True:
                try:
                    rewards.append(await episode())
                    failures.succeeded(("e", str(number)))
                    break
                except EnvironmentFailed as error:
                    ending = ending_of(error, lost_tools=True)
                    assert ending.cause == "environment" and ending.reward.value is None
                    attempt += 1
                    if not failures.failed(("e", str(number)), attempt, str(error)):
                        rewards.append(ending.reward.value)
                        break
                    await asyncio.sleep(failures.backoff_s(attempt))
        assert failures.count > 10
        return rewards

    assert run_virtually(attempts()) == [1.0] * 200


def test_what_is_kept_of_a_long_error_says_that_it_was_cut() -> None:
    try:
        raise ValueError("x" * 1_000_000)
    except ValueError as error:
        detail = ending_of(error, lost_tools=False).detail
    assert detail.startswith("ValueError: xx") and "cut: " in detail and len(detail) < 80_000
