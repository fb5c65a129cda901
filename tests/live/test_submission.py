"""Steps and actions as futures of the client: what brings their results, and what becomes of those that do not come."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from worlds.dask_cluster import with_cluster

from heddle_dask.core.ids import ActionId, StepId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, StepRequest
from heddle_dask.engines.contract import GenerateResult, SamplingParams
from heddle_dask.live.driver.connection import submission
from heddle_dask.live.driver.connection.submission import Interrupted, Submitter
from heddle_dask.live.wire import _dask_internals as internals
from heddle_dask.live.wire import results
from heddle_dask.live.wire.driver_messages import SubmitTasks
from heddle_dask.live.wire.messages import ActionCall, ActionOutcome, Key, StepCall, StepResult, action_key
from heddle_dask.live.wire.results import ResultNotice, packed_result
from heddle_dask.live.wire.transport import Handlers

pytestmark = pytest.mark.cluster

STEP = StepCall("s", StepId(TrajectoryId("t"), 0, 0), 0, 0, b"", SamplingParams(max_tokens=8))


async def until(condition: Any) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("condition not met within a minute")


class Plane:
    """A scheduler that holds every task, as long as no test says otherwise; its results come as a test sends them."""

    def __init__(self, client: Client, scheduler: Scheduler) -> None:
        self.client = client
        self.scheduler = scheduler
        handlers = Handlers(lambda session, failure: pytest.fail(failure))
        handlers.take(SubmitTasks, self.submitted)
        handlers.add_to(scheduler)
        self.submitter = Submitter(client, "s")

    def submitted(self, client: str, message: SubmitTasks) -> None:
        internals.create_held(self.scheduler, client, [(task.key, task.run) for task in message.tasks])
        internals.begin(self.scheduler, [task.key for task in message.tasks], "test")

    async def ask(self, name: str) -> asyncio.Task[ActionOutcome]:
        """An action, once the scheduler has its task."""
        call = ActionCall("s", name, b"", None, name)
        request = ActionRequest(ActionId(name), TrajectoryId("t"), "tool", "name")
        asking = asyncio.ensure_future(self.submitter.action(call, request))
        await until(lambda: call.key in self.scheduler.tasks)
        return asking

    async def ask_step(self) -> asyncio.Task[StepResult]:
        asking = asyncio.ensure_future(self.submitter.step(STEP, StepRequest(STEP.step_id, 0, 8)))
        await until(lambda: STEP.key in self.scheduler.tasks)
        return asking

    def answer(self, key: Key, result: StepResult | ActionOutcome) -> None:
        notice = ResultNotice(key[1], key, packed_result(result))
        internals.send_to_client(self.scheduler, self.client.id, notice.to_wire())

    def run(self, name: str) -> None:
        """Have Dask run the action itself on its one worker, which has no plugin of ours."""
        key = action_key("s", name)
        ts = self.scheduler.tasks[key]
        (address,) = self.scheduler.workers
        internals.pin(ts, address, {}, (0, 0, 0), {})
        internals.release(self.scheduler, [key], "test")


def on_plane(body: Any) -> None:
    async def whole(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        plane = Plane(client, scheduler)
        await body(plane)
        await plane.submitter.close()
        await until(lambda: not scheduler.tasks)  # nothing is kept
        assert not client.futures

    with_cluster(whole)


async def outcome_without_plugin(call: ActionCall) -> ActionOutcome:
    if call.action_id == "fails":
        raise ValueError("no plugin")
    return ActionOutcome("ok", call.action_id.encode())


def test_a_result_in_the_stream_is_taken_and_its_future_released_later() -> None:
    async def body(plane: Plane) -> None:
        asking = await plane.ask("a")
        assert plane.scheduler.tasks[action_key("s", "a")].state == "no-worker", "held: nothing runs by accident"
        plane.answer(action_key("other", "a"), ActionOutcome("raised"))  # of a session that has ended: dropped
        plane.answer(action_key("s", "unknown"), ActionOutcome("raised"))
        plane.answer(action_key("s", "a"), ActionOutcome("ok", b"1"))
        assert await asking == ActionOutcome("ok", b"1")
        asking, key = await plane.ask("b"), action_key("s", "b")
        internals.send_to_client(plane.scheduler, plane.client.id, ResultNotice("s", key, b"no pickle").to_wire())
        with pytest.raises(pickle.UnpicklingError):  # and does not wait for ever
            await asking
        await until(lambda: not plane.scheduler.tasks)

    on_plane(body)


def test_a_cancelled_action_is_told_and_what_comes_after_the_end_of_a_session_is_dropped() -> None:
    async def body(plane: Plane) -> None:
        handlers = Handlers(lambda session, failure: pytest.fail(failure))
        told: list[str] = []
        handlers.take_report(submission.ActionCancelled, lambda session, event: told.append(event.action_id))
        handlers.add_to(plane.scheduler)
        asking = await plane.ask("a")
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: told == ["a"])
        await plane.submitter.close()
        plane.answer(action_key("s", "a"), ActionOutcome("ok", b"1"))
        assert await plane.client.submit(lambda: 7) == 7, "the client's stream goes on"

    on_plane(body)


def test_a_result_that_is_not_in_the_stream_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "run_action", outcome_without_plugin)

    async def body(plane: Plane) -> None:
        asked = [await plane.ask(name) for name in ("a", "fails")]
        plane.run("a")
        assert await asked[0] == ActionOutcome("ok", b"a")
        plane.run("fails")
        with pytest.raises(ValueError, match="no plugin"):
            await asked[1]

    on_plane(body)


def test_a_long_result_is_left_to_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "CARRIED_BYTES", 1000)
    assert packed_result(ActionOutcome("ok", bytes(1000))) == b""
    assert packed_result(ActionOutcome("ok", bytes(10)))


def test_a_result_that_is_lost_while_it_is_fetched_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "run_action", outcome_without_plugin)

    async def body(plane: Plane) -> None:
        asked, may_answer = asyncio.Event(), asyncio.Event()
        handler = plane.scheduler.handlers["who_has"]

        async def slow(*arguments: Any, **more: Any) -> Any:
            asked.set()
            await may_answer.wait()
            return await answer if asyncio.iscoroutine(answer := handler(*arguments, **more)) else answer

        plane.scheduler.handlers["who_has"] = slow
        results = [await plane.ask(name) for name in ("lost", "late")]
        plane.run("lost")
        plane.run("late")
        await asked.wait()
        plane.submitter.interrupt(action_key("s", "lost"), "result-lost", "its worker died")
        with pytest.raises(Interrupted, match="its worker died"):
            await results[0]
        may_answer.set()
        assert await results[1] == ActionOutcome("ok", b"late")

    on_plane(body)


def test_a_task_that_a_client_cancels_is_an_interrupt() -> None:
    async def body(plane: Plane) -> None:
        asking = await plane.ask("a")
        key = action_key("s", "a")
        await plane.client.cancel([plane.submitter._futures[key]], force=True)
        with pytest.raises(Interrupted, match="cancelled its task"):
            await asking

    on_plane(body)


def test_the_tokens_of_a_cancelled_step_are_counted_once() -> None:
    made = GenerateResult((1, 2, 3), (0.0, 0.0, 0.0), "abort", 0, 1, 0.0, 0.0, 0.0).packed()

    async def body(plane: Plane) -> None:
        handlers = Handlers(lambda session, failure: pytest.fail(failure))
        told: list[Any] = []
        handlers.take_report(submission.StepCancelled, lambda session, event: told.append(event))
        handlers.add_to(plane.scheduler)
        discarded: list[tuple[str, int]] = []
        plane.submitter.on_discarded = lambda trajectory, tokens: discarded.append((trajectory, tokens))
        asking = await plane.ask_step()
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: told)
        for _ in range(2):
            plane.answer(STEP.key, StepResult("aborted", generated=made))
        await until(lambda: discarded)
        assert discarded == [("t", 3)]

    on_plane(body)
