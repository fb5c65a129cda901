"""One test per assumption that `live._dask_internals` makes about `distributed`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dask
import pytest
from dask.utils import key_split
from distributed import Client, LocalCluster, Scheduler, Worker, get_worker
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin
from worlds.dask_cluster import with_cluster

from heddle_dask.core.nouns import NORMAL, Priority
from heddle_dask.live.wire import _dask_internals as internals

# A nanny of this process needs Python's resource tracker, which is started again where it has ended.
pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore:resource_tracker. process died:UserWarning")]


class Recorder(SchedulerPlugin):
    """Runs a callback in `update_graph`, and notes transitions."""

    def __init__(self, on_graph: Callable[..., None] = lambda *a, **k: None) -> None:
        self.on_graph = on_graph
        self.log: list[tuple[Any, str]] = []

    def update_graph(self, scheduler: Scheduler, **kwargs: Any) -> None:
        self.on_graph(scheduler, **kwargs)

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        self.log.append((key, finish))


def submit(client: Client, task: Callable[..., Any], values: list[Any], **annotations: Any) -> list[Any]:
    keys = [("step", value) for value in values]
    with dask.annotate(**annotations):
        return client.map(task, values, key=keys, pure=False, resources={internals.HOLD_RESOURCE: 1})


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("condition not met within a minute")


async def note_order(value: int) -> int:
    worker = get_worker()
    if not hasattr(worker, "order"):
        worker.order = []
    worker.order.append(value)
    await asyncio.sleep(0.01)
    return value


def test_a_held_task_waits_until_it_is_pinned_and_released() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        (future,) = submit(client, note_order, [1])
        await until(lambda: ("step", 1) in scheduler.tasks)
        ts = scheduler.tasks["step", 1]
        await until(lambda: ts.state == "no-worker")
        await asyncio.sleep(0.1)
        assert ts.state == "no-worker"
        internals.pin(ts, workers[0].address, {"LLM": 1}, internals.dask_priority(NORMAL, 1), {})
        internals.release(scheduler, [("step", 1)], "test")
        assert await future == 1

    with_cluster(body)


def test_pinned_in_update_graph_tasks_queue_by_our_priority_and_ties_in_order() -> None:
    """A free worker takes the first that arrives; those that must wait then go by priority."""

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        priorities = {1: 5.0, 2: 9.0, 3: 7.0, 4: 7.0, 5: -3.0, 6: 100.0}

        def on_graph(scheduler: Scheduler, *, keys: set[Any], **kwargs: Any) -> None:
            for key in keys:
                rank = internals.dask_priority(Priority(0, priorities[key[1]]), key[1])
                internals.pin(scheduler.tasks[key], workers[0].address, {"LLM": 1}, rank, {})

        scheduler.add_plugin(Recorder(on_graph), name="test")
        futures = submit(client, note_order, list(priorities))
        await client.gather(futures)
        assert workers[0].order == [1, 6, 2, 3, 4, 5]  # type: ignore[attr-defined]

    with_cluster(body)


def test_dask_priority_reverses_our_sign_and_keeps_the_order_of_ties() -> None:
    ours = [(Priority(0, 3.0), 1), (Priority(0, 8.0), 2), (Priority(0, 8.0), 3), (Priority(-1, 9.0), 4)]
    dask_order = sorted(ours, key=lambda pair: internals.dask_priority(*pair))
    assert [order for _, order in dask_order] == [2, 3, 1, 4]


def test_created_tasks_wait_are_pinned_and_run_and_their_futures_tell() -> None:
    """Our own tasks of a client need no graph: Dask treats them as those of one."""

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        told: list[tuple[Any, str]] = []
        keys = [("step", value) for value in range(4)]
        futures = [internals.told_future(client, key, lambda *what: told.append(what)) for key in keys]
        placed = {1: {"engine": "one"}, 2: {"engine": "two"}, 3: {}}
        runs = [(key, internals.packed_run(note_placement, key[1])) for key in keys]
        internals.create_held(scheduler, client.id, runs)
        for value, placement in placed.items():
            rank = internals.dask_priority(NORMAL, -value)
            internals.pin(scheduler.tasks["step", value], workers[0].address, {"LLM": 1}, rank, placement)
        internals.begin(scheduler, keys, "test")
        internals.create_held(scheduler, client.id, runs)  # again: nothing is made twice
        assert [scheduler.tasks[key].state for key in keys] == ["no-worker", *["processing"] * 3]
        assert await futures[1] == {"engine": "one"}
        assert await futures[2] == {"engine": "two"}
        with pytest.raises(ValueError, match="three"):
            await futures[3]
        await client.cancel([futures[0]], force=True)
        await until(lambda: (keys[0], "cancelled") in told)
        assert set(told) == {(keys[0], "cancelled"), (keys[1], "finished"), (keys[2], "finished"), (keys[3], "error")}
        for future in futures:
            future.release()
        await until(lambda: not scheduler.tasks)
        await workers[0].heartbeat()  # it tells of what each span of tasks has used
        assert not workers[0].state.tasks

    with_cluster(body)


async def note_placement(value: int) -> dict[str, Any]:
    if value == 3:
        raise ValueError("three")
    return dict(internals.task_annotation(get_worker(), ("step", value)))


def test_a_message_to_a_client_comes_in_order_with_the_news_of_its_futures() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        heard: list[Any] = []

        class Tells(Recorder):
            def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
                if start == "processing":
                    internals.send_to_client(scheduler, client.id, {"op": "test-heard", "value": key[1]})

        internals.add_client_handler(client, "test-heard", lambda value: heard.append(value))
        scheduler.add_plugin(Tells(), name="tells")
        for number in range(10):
            future = internals.told_future(client, ("step", number), lambda *what: heard.append(what))
            internals.create_held(scheduler, client.id, [(future.key, internals.packed_run(note_order, number))])
            internals.pin(scheduler.tasks[future.key], workers[0].address, {}, (0, 0, 0), {})
            internals.begin(scheduler, [future.key], "test")
            await future
            assert heard == [number, (("step", number), "finished")]
            heard.clear()
            future.release()
            await until(lambda: heard)
            assert heard == [(("step", number), "cancelled")]
            heard.clear()
        internals.send_to_client(scheduler, "gone", {"op": "test-heard", "value": 1})

    with_cluster(body)


def test_a_workers_message_arrives_before_its_task_is_done() -> None:
    events: list[str] = []

    async def tell(value: int) -> int:
        internals.send_from_worker(get_worker(), {"op": "test-ended", "value": value})
        return value

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        recorder = Recorder()
        scheduler.add_plugin(recorder, name="test")
        internals.add_handlers(
            scheduler,
            rpc={},
            stream={"test-ended": lambda worker, value: recorder.log.append((value, "told"))},
        )
        futures = client.map(tell, range(20), key=[("tell", i) for i in range(20)], pure=False)
        await client.gather(futures)
        for i in range(20):
            told = recorder.log.index((i, "told"))
            assert told < recorder.log.index((("tell", i), "memory"))
        events.append("checked")

    with_cluster(body)
    assert events == ["checked"]


def test_rpc_and_stream_handlers_can_be_added_to_a_running_scheduler_and_worker() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        heard: list[Any] = []

        async def answer(value: int) -> int:
            return value + 1

        internals.add_handlers(
            scheduler,
            rpc={"test_answer": answer},
            stream={"test-heard": lambda client, value: heard.append((client, value))},
        )
        assert await internals.call_scheduler(client, "test_answer", value=4) == 5
        internals.send_from_client(client, {"op": "test-heard", "value": 6})
        await until(lambda: heard)
        assert heard == [(client.id, 6)]
        on_worker: list[int] = []
        internals.add_handlers(workers[0], rpc={"test_answer": answer}, stream={"test-heard": on_worker.append})
        workers[0].stream_handlers["test-heard"] = lambda value: on_worker.append(value)
        assert await scheduler.rpc(workers[0].address).test_answer(value=7) == 8
        internals.send_to_worker(scheduler, workers[0].address, {"op": "test-heard", "value": 9})
        await until(lambda: on_worker)
        assert on_worker == [9]
        internals.send_to_worker(scheduler, "tcp://127.0.0.1:1", {"op": "test-heard", "value": 9})

    with_cluster(body)


def test_an_unknown_handler_is_a_runtime_error() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        with pytest.raises(RuntimeError, match="no handler heddle_nonsense"):
            await internals.call_scheduler(client, "heddle_nonsense")

    with_cluster(body)


def test_work_stealing_does_not_touch_a_pinned_task() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        target = workers[0].address

        def on_graph(scheduler: Scheduler, *, keys: set[Any], **kwargs: Any) -> None:
            for key in keys:
                rank = internals.dask_priority(NORMAL, key[1])
                internals.pin(scheduler.tasks[key], target, {"LLM": 1}, rank, {})

        scheduler.add_plugin(Recorder(on_graph), name="test")
        assert scheduler.extensions["stealing"] is not None
        futures = submit(client, note_order, list(range(60)))
        await client.gather(futures)
        assert len(workers[0].order) == 60  # type: ignore[attr-defined]
        assert not hasattr(workers[1], "order")

    with_cluster(body, workers=2)


def test_tasks_of_a_dead_worker_wait_without_worker_when_the_hook_runs() -> None:
    async def forever(value: int) -> None:
        await asyncio.sleep(60)

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        target = workers[0].address
        states: list[str] = []

        class Watcher(Recorder):
            def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
                states.extend(ts.state for key, ts in scheduler.tasks.items() if key[0] == "step")

        def on_graph(scheduler: Scheduler, *, keys: set[Any], **kwargs: Any) -> None:
            for key in keys:
                internals.pin(scheduler.tasks[key], target, {"LLM": 1}, internals.dask_priority(NORMAL, key[1]), {})

        scheduler.add_plugin(Watcher(on_graph), name="test")
        futures = submit(client, forever, [1, 2])
        await until(lambda: scheduler.tasks.get(("step", 2)) is not None)
        await until(lambda: scheduler.tasks["step", 2].state == "processing")
        await scheduler.remove_worker(target, stimulus_id="test", expected=False)
        assert states == ["no-worker", "no-worker"]
        for i in (1, 2):
            ts = scheduler.tasks["step", i]
            assert ts.suspicious == 1
            internals.reset_suspicion(ts)
            assert ts.suspicious == 0
            internals.hold(ts)
        del futures

    with_cluster(body, workers=2)


def test_a_client_calls_handlers_of_a_worker() -> None:
    async def answer(number: int) -> Any:
        return {"value": [number]}

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        (worker,) = workers
        internals.add_handlers(worker, rpc={"probe": answer}, stream={})
        got = await internals.call_worker(client, worker.address, "probe", number=3)
        assert list(got["value"]) == [3]
        with pytest.raises(OSError, match="no handler absent"):
            await internals.call_worker(client, worker.address, "absent")
        client.rpc.timeout = 1.0  # where no process listens, it tries for so long
        with pytest.raises(OSError):
            await internals.call_worker(client, "tcp://127.0.0.1:1", "probe", number=1)

    with_cluster(body)


def test_a_worker_plugin_hears_of_an_end_before_the_scheduler_does() -> None:
    """What a plugin sends from `transition` reaches the scheduler before Dask's own report."""
    heard: list[str] = []

    class Ends(WorkerPlugin):
        name = "ends"

        def setup(self, worker: Worker) -> None:
            self.worker = worker

        def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
            if start == "executing":
                internals.send_from_worker(self.worker, {"op": "probe-ended", "finish": finish})

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        class Notes(SchedulerPlugin):
            def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
                if finish == "memory":
                    heard.append("dask")

        internals.add_handlers(scheduler, rpc={}, stream={"probe-ended": lambda worker, finish: heard.append(finish)})
        scheduler.add_plugin(Notes(), name="notes")
        await client.register_plugin(Ends())
        for value in range(5):
            future = client.submit(note_order, value, pure=False)
            await future
        assert heard == ["memory", "dask"] * 5

    with_cluster(body)


def test_streams_can_be_quick_and_keep_nothing_of_what_they_sent() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        internals.shorten_worker_interval(scheduler, workers[0].address, 0.001)
        internals.shorten_client_report_interval(scheduler, client.id, 0.001)
        internals.shorten_own_interval(workers[0], 0.001)
        internals.shorten_own_interval(client, 0.001)
        assert scheduler.stream_comms[workers[0].address].interval == 0.001
        assert scheduler.client_comms[client.id].interval == 0.001
        assert workers[0].batched_stream.interval == 0.001
        assert client.scheduler_comm is not None
        assert client.scheduler_comm.interval == 0.001
        sent = client.scheduler_comm.batch_count
        assert await client.submit(lambda: 7) == 7
        assert client.scheduler_comm.batch_count > sent and not client.scheduler_comm.recent_message_log

    with_cluster(body)


def test_the_scheduler_knows_whether_a_worker_that_left_was_retired() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        retired, died = (worker.address for worker in workers[:2])
        await scheduler.retire_workers(workers=[retired])
        await scheduler.remove_worker(died, stimulus_id="test")
        assert internals.left_as_asked(scheduler, retired) and not internals.left_as_asked(scheduler, died)
        assert not internals.left_as_asked(scheduler, "tcp://unknown")

    with_cluster(body, workers=2)


def test_what_is_called_on_a_loop_takes_the_place_of_what_was() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        calls: list[str] = []
        for name in ("first", "second"):
            internals.call_every(workers[0], 0.01, partial(calls.append, name))
        while len(calls) < 3:
            await asyncio.sleep(0.01)
        assert set(calls) == {"second"}

    with_cluster(body)


def test_the_cache_of_task_names_holds_whole_keys_and_can_be_emptied() -> None:
    internals.forget_task_names(most=0)

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        await client.gather(client.map(abs, range(8), key=[("llm", "s", n) for n in range(8)]))
        assert key_split.cache_info().currsize >= 8
        internals.forget_task_names(most=4)
        assert key_split.cache_info().currsize == 0

    with_cluster(body)


class _DiesAtTheEnd(WorkerPlugin):
    """Takes its process with it on one worker; tells in a file that it was removed from another."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    async def teardown(self, worker: Worker) -> None:
        if worker.name == 0:
            os._exit(1)
        await asyncio.sleep(0.5)  # the other has died by then
        (self.notes / "removed").touch()


def test_a_plugin_is_removed_from_all_workers_though_one_dies_meanwhile(tmp_path: Path) -> None:
    async def run() -> None:
        async with (
            LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                dashboard_address="127.0.0.1:0",
                asynchronous=True,
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await client.register_plugin(_DiesAtTheEnd(tmp_path), name="ends")
            await internals.forget_worker_plugin(cluster.scheduler, "ends")
            there = await client.run(lambda dask_worker: "ends" in dask_worker.plugins, on_error="ignore")
            assert there and not any(there.values())
            assert "ends" not in cluster.scheduler.worker_plugins

    asyncio.run(asyncio.wait_for(run(), 120))
    assert (tmp_path / "removed").exists()


def test_a_set_of_workers_restricts_a_free_task_and_a_change_of_the_set_counts() -> None:
    async def where(value: int) -> str:
        return get_worker().address

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        first, second = (worker.address for worker in workers)
        allowed = {first}

        def on_graph(scheduler: Scheduler, *, tasks: list[Any], **kwargs: Any) -> None:
            for key in tasks:
                internals.restrict_if_free(scheduler.tasks[key], allowed)

        scheduler.add_plugin(Recorder(on_graph), name="test")

        async def places(count: int, **restrictions: Any) -> set[str]:
            return set(await client.gather(client.map(where, range(count), pure=False, **restrictions)))

        assert await places(40) == {first}
        assert await places(4, workers=[second]) == {second}, "one with a restriction of its own"
        allowed.clear()
        allowed.add("tcp://127.0.0.1:1")
        future = client.submit(where, 0, pure=False)
        await until(lambda: internals.unrunnable_in(scheduler, allowed) == [future.key])
        # Nobody is in the set any more: Dask takes that for no restriction.
        allowed.clear()
        internals.release(scheduler, internals.unrunnable_in(scheduler, allowed), "test")
        assert await future in (first, second)

    with_cluster(body, workers=2)


def test_the_threads_of_a_worker_can_be_bounded_and_restored() -> None:
    def thread_of(value: int) -> int:
        time.sleep(0.005)
        return threading.get_ident()

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        before = internals.bound_threads(workers[0], 3)
        assert before == workers[0].state.nthreads == 64
        threads = await client.gather(client.map(thread_of, range(60), pure=False))
        assert len(set(threads)) <= 3
        internals.restore_threads(workers[0], before)
        threads = await client.gather(client.map(thread_of, range(60), pure=False))
        assert len(set(threads)) > 3

    with_cluster(body)


def test_a_result_is_needed_as_long_as_a_client_holds_its_future_and_no_other_worker_has_it() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        state = scheduler.workers[workers[0].address]
        future = client.submit(sum, (1, 2), workers=[workers[0].address], pure=False)
        await future
        assert internals.results_needed(state) == 1
        await client.replicate([future], n=2)
        assert internals.results_needed(state) == 0
        del future
        await until(lambda: not state.has_what)

    with_cluster(body, workers=2)


def test_a_worker_is_called_through_the_scheduler() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        async def length(value: bytes) -> dict[str, int]:
            return {"length": len(value)}

        internals.add_handlers(workers[0], {"test_length": length}, {})
        address = workers[0].address
        ask = internals.call_worker_through_scheduler
        assert await ask(client, address, "test_length", value=bytes(3 << 20)) == {"length": 3 << 20}
        # Where no process listens, Dask tries for so long.
        with dask.config.set({"distributed.comm.timeouts.connect": "1s"}), pytest.raises(OSError):
            await ask(client, "tcp://127.0.0.1:1", "test_length", value=b"")

    with_cluster(body)


def test_the_scheduler_removes_a_plugin_from_its_workers() -> None:
    class Noted(WorkerPlugin):
        name = "noted"

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        await client.register_plugin(Noted())
        assert all("noted" in worker.plugins for worker in workers)
        await internals.forget_worker_plugin(scheduler, "noted")
        assert "noted" not in scheduler.worker_plugins
        assert all("noted" not in worker.plugins for worker in workers)
        await internals.forget_worker_plugin(scheduler, "noted")

    with_cluster(body, workers=2)


def test_a_task_that_is_put_first_gets_the_next_unit_of_a_resource() -> None:
    async def blocked(name: str) -> str:
        if name != "last":
            await asyncio.Event().wait()
        return name

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        (worker,) = workers
        names = ("runs", "waits", "waits too", "last")
        futures = [
            client.submit(blocked, name, key=("step", name), resources={"LLM": 1}, priority=-number, pure=False)
            for number, name in enumerate(names)
        ]
        await until(lambda: len(worker.state.tasks) == len(names))
        for key in (("step", "last"), ("step", "runs"), ("step", "unknown")):
            internals.put_first(worker, key)
        internals.lend_resource(worker, "LLM", 1)
        assert await futures[-1] == "last"
        # The unit goes on to the first of the others: what is left of the last one in Dask's heap does no harm.
        assert {ts.key for ts in worker.state.executing} == {("step", "runs"), ("step", "waits")}
        assert {ts.key for ts in worker.state.constrained} == {("step", "waits too")}
        internals.lend_resource(worker, "LLM", -1)

    with_cluster(body)


def test_a_removed_worker_tells_of_its_resources_and_nothing_happens() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        removed, kept = workers
        await scheduler.remove_worker(removed.address, stimulus_id="test", close=False)
        with pytest.raises(KeyError):
            await internals.publish_resource(removed, "SLOT", 2)
        internals.pass_over_resources_of_removed(scheduler)
        for worker in workers:
            await internals.publish_resource(worker, "SLOT", 3)
        assert scheduler.resources["SLOT"] == {kept.address: 3}

    with_cluster(body, workers=2)


def test_a_lent_unit_of_a_resource_starts_a_task_that_waits_for_it() -> None:
    async def blocked(name: str) -> str:
        if name == "first":
            await asyncio.Event().wait()
        return name

    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        (worker,) = workers
        futures = [
            client.submit(blocked, name, key=("step", name), resources={"LLM": 1}, pure=False)
            for name in ("first", "second")
        ]
        await until(lambda: len(worker.state.tasks) == 2)
        assert all(internals.is_pending(worker, ("step", name)) for name in ("first", "second"))
        assert not internals.is_pending(worker, ("step", "third"))
        assert set(internals.tasks_at(scheduler, worker.address)) == {("step", "first"), ("step", "second")}
        assert internals.tasks_at(scheduler, "tcp://127.0.0.1:9") == []
        internals.lend_resource(worker, "LLM", 1)
        assert await futures[1] == "second"
        assert not internals.is_pending(worker, ("step", "second"))
        assert ("step", "second") in internals.tasks_at(scheduler, worker.address), "its result is there"
        internals.lend_resource(worker, "LLM", -1)
        assert (worker.state.total_resources["LLM"], worker.state.available_resources["LLM"]) == (1, 0)

    with_cluster(body)


def test_a_worker_waits_for_an_event_that_the_scheduler_sets() -> None:
    async def body(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
        (worker,) = workers
        assert not await internals.event_is_set(worker, "here")
        waits = asyncio.create_task(internals.event_is_set(worker, "here", wait=True))
        given_up = asyncio.create_task(internals.event_is_set(worker, "here", wait=True))
        await until(lambda: scheduler.extensions["events"]._waiter_count["here"] == 2)
        given_up.cancel()
        internals.set_event(scheduler, "here")
        assert await waits
        assert await internals.event_is_set(worker, "here")
        assert await internals.event_is_set(worker, "here", wait=True)

    with_cluster(body)
