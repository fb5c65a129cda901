"""Everything we use of `distributed` that is not documented, and the conversion to Dask's priorities.

`tests/live/test_dask_internals.py` has a test per assumption made here: when a new release of `distributed` breaks
one, that test says which. Nothing else in the package touches an undocumented attribute.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from dask._task_spec import Task
from dask.utils import key_split
from distributed import Client, Future, Scheduler, Status, Worker
from distributed.batched import BatchedSend
from distributed.client import FutureState
from distributed.core import rpc
from distributed.scheduler import TaskState, WorkerState
from distributed.scheduler import heartbeat_interval as heartbeat_interval
from distributed.worker_state_machine import UnpauseEvent
from tornado.ioloop import PeriodicCallback

from heddle_dask.core.nouns import Priority

# A resource that no worker has: a task that needs it waits in state "no-worker" until it is released.
HOLD_RESOURCE = "HEDDLE-HOLD"
# Dask annotation under which the placement of a task travels to its worker.
ANNOTATION = "heddle"
# Below any order or level that a priority has.
_FIRST = -(2**62)
# A worker without a heartbeat for so long is not waited for: its process is stopped, or its event loop blocked.
SILENT_S = 10.0


def dask_priority(priority: Priority, order: int) -> tuple[float, float, int]:
    """Dask's form of our priority: smaller runs first, a tuple of three numbers like Dask's own.

    `order` makes it distinct: equal priorities would run last-in-first-out on a worker.
    """
    return (-priority.level, -priority.tokens, order)


def hold(ts: TaskState) -> None:
    """Keep a task that was not dispatched yet from running anywhere."""
    ts.resource_restrictions = {HOLD_RESOURCE: 1}
    ts.worker_restrictions = None


def pin(
    ts: TaskState,
    address: str,
    resources: Mapping[str, float],
    priority: tuple[float, float, int],
    annotation: Mapping[str, Any],
) -> None:
    """Bind a task that was not dispatched yet to one worker, before its next transition.

    `annotation` travels with the task to the worker, where `task_annotation` reads it.
    """
    ts.worker_restrictions = {address}
    ts.host_restrictions = None
    ts.loose_restrictions = False
    ts.resource_restrictions = dict(resources)
    ts.priority = priority
    ts.annotations = {**(ts.annotations or {}), ANNOTATION: dict(annotation)}


def restrict_if_free(ts: TaskState, addresses: set[str]) -> None:
    """Bind a new task without any restriction to these workers; the set itself is kept, and may change later.

    Dask takes an empty set for no restriction.
    """
    bound = ts.worker_restrictions or ts.host_restrictions or ts.resource_restrictions
    if ts.state == "released" and not bound:
        ts.worker_restrictions = addresses


def unrunnable_in(scheduler: Scheduler, addresses: set[str]) -> list[Any]:
    """Keys of the tasks that were bound to this set, and for which there was no worker."""
    return [ts.key for ts in scheduler.unrunnable if ts.worker_restrictions is addresses]


def bound_threads(worker: Worker, most: int) -> int:
    """Let tasks that are no coroutines use at most so many threads of a worker; returns the limit before.

    Steps and actions are coroutines and need none, whatever ``--nthreads`` says.
    """
    threads: Any = worker.executors["default"]
    before: int = threads._max_workers
    threads._max_workers = min(before, most)
    return before


def restore_threads(worker: Worker, most: int) -> None:
    threads: Any = worker.executors["default"]
    threads._max_workers = most


def release(scheduler: Scheduler, keys: Iterable[Any], stimulus_id: str) -> None:
    """Dispatch held tasks that were pinned since. Must not be called inside a transition."""
    held = {}
    for key in keys:
        ts = scheduler.tasks.get(key)
        if ts is not None and ts.state == "no-worker":
            held[key] = "processing"
    if held:
        scheduler.transitions(held, stimulus_id)  # type: ignore[arg-type]


def tasks_at(scheduler: Scheduler, address: str) -> list[Any]:
    """Keys of the tasks that a worker runs or has been sent, and of those whose results it holds."""
    ws = scheduler.workers.get(address)
    return [] if ws is None else [ts.key for ts in (*ws.processing, *ws.has_what)]


def is_pending(worker: Worker, key: Any) -> bool:
    """Whether a task has come to this worker and has not ended."""
    ts = worker.state.tasks.get(key)
    return ts is not None and ts.state not in ("memory", "error", "released", "forgotten", "cancelled")


def put_first(worker: Worker, key: Any) -> None:
    """Let a task that waits for a resource of this worker be the next one to get it."""
    state = worker.state
    ts = state.tasks.get(key)
    if ts is None or ts not in state.constrained:
        return
    # Dask's heap takes the priority that a task has when it is added; an entry of before is passed over.
    state.constrained.discard(ts)
    assert ts.priority is not None
    ts.priority = (_FIRST, *ts.priority[1:])
    state.constrained.add(ts)


def lend_resource(worker: Worker, name: str, units: float) -> None:
    """Let tasks that wait for a resource take so many more units, or fewer, than the scheduler knows of."""
    state = worker.state
    for known in (state.available_resources, state.total_resources):
        known[name] = known.get(name, 0.0) + units
    if units > 0 and worker.status is Status.running:
        # The worker looks for a task that can start when something has happened, and a lent unit is nothing to it.
        worker.handle_stimulus(UnpauseEvent(stimulus_id="heddle-lent-resource"))


def reset_suspicion(ts: TaskState) -> None:
    """Set the number of workers that died with this task to 0: the controller counts losses itself.

    Dask counts one for every task assigned to a dead worker, started or not, and fails a task at its fourth.
    """
    ts.suspicious = 0


def add_handlers(
    server: Scheduler | Worker,
    rpc: Mapping[str, Callable[..., Any]],
    stream: Mapping[str, Callable[..., Any]],
) -> None:
    """Add RPC handlers (request, answer) and stream handlers (no answer) to a running scheduler or worker.

    The stream of a worker carries what the scheduler sends with `send_to_worker`.
    """
    server.handlers.update(rpc)
    server.stream_handlers.update(stream)


def send_to_worker(scheduler: Scheduler, address: str, message: dict[str, Any]) -> None:
    """Send to a worker in order with task messages; a worker that has left is ignored."""
    stream = scheduler.stream_comms.get(address)
    if stream is not None and not stream.closed():
        stream.send(message)


def send_from_worker(worker: Worker, message: dict[str, Any]) -> None:
    """Send to the scheduler in order with this worker's task messages; dropped once disconnected."""
    stream = worker.batched_stream
    if not stream.closed():  # before the connection stands, messages wait in the stream
        stream.send(message)


def send_from_client(client: Client, message: dict[str, Any]) -> None:
    """Send to the scheduler, in order; to be called on the client's event loop."""
    client._send_to_scheduler_safe(message)


def send_to_client(scheduler: Scheduler, client_id: str, message: dict[str, Any]) -> None:
    """Send to a client, in order with what Dask tells it of its futures; one that has gone is ignored."""
    stream = scheduler.client_comms.get(client_id)
    if stream is not None and not stream.closed():
        stream.send(message)


def add_client_handler(client: Client, op: str, handler: Callable[..., None]) -> None:
    """Have a client hand what `send_to_client` sends with this operation to `handler`, for ever: Dask logs others."""
    client._stream_handlers[op] = handler


class _ToldState(FutureState):
    """The state of a future that tells when it is finished, failed or cancelled; waiting for it takes a task each."""

    __slots__ = ("_tell",)

    def __init__(self, key: Any, tell: Callable[[Any, str], None]) -> None:
        super().__init__(key)
        self._tell = tell

    def finish(self, type: Any = None) -> None:
        super().finish(type)
        self._tell(self.key, self.status)

    def set_error(self, exception: Any, traceback: Any) -> None:
        super().set_error(exception, traceback)
        self._tell(self.key, self.status)

    def cancel(self, reason: Any = None, msg: Any = None) -> None:
        super().cancel(reason, msg)
        self._tell(self.key, self.status)


def told_future(client: Client, key: Any, tell: Callable[[Any, str], None]) -> Future:
    """The future of a key that the client is about to submit.

    Parameters
    ----------
    tell
        Takes key and status when it is ``"finished"``, ``"error"`` or ``"cancelled"``, also because it is released.
    """
    client.futures[key] = _ToldState(key, tell)
    return Future(key, client)


def packed_run(function: Callable[..., Any], argument: Any) -> bytes:
    """What a task calls, a coroutine function, pickled: the scheduler passes it on unopened."""
    return pickle.dumps((function, argument))


async def _run_packed(run: bytes) -> Any:
    function, argument = pickle.loads(run)
    return await function(argument)


class _PackedTask(Task):
    """A task whose call nobody opens before it runs, and that travels as its key and its call."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _packed_task, (self.key, *self.args)


def _packed_task(key: Any, run: bytes) -> _PackedTask:
    return _PackedTask(key, _run_packed, run)


def create_held(scheduler: Scheduler, client_id: str, runs: Sequence[tuple[Any, bytes]]) -> None:
    """Create tasks that a client wants, held, as Dask does for a graph of them; `begin` gives them to Dask.

    A graph of one task costs scheduler and client several times as much.
    """
    tasks = []
    for number, (key, run) in enumerate(runs):
        if key in scheduler.tasks:
            continue
        ts = scheduler.new_task(key, _packed_task(key, run), "released")
        ts.priority = (0, scheduler.generation, number)
        hold(ts)
        tasks.append(ts)
    spans = scheduler.extensions.get("spans")
    if spans is not None and not all(ts.group.span_id for ts in tasks):
        spans.observe_tasks(tasks, code=(), span_metadata={})
    scheduler.client_desires_keys([key for key, _ in runs], client_id)


def begin(scheduler: Scheduler, keys: Iterable[Any], stimulus_id: str) -> None:
    """Dask's first transitions of created tasks: those that were pinned since are dispatched, the others wait."""
    waiting = {key: "waiting" for key in keys if scheduler.tasks[key].state == "released"}
    scheduler.transitions(dict(reversed(waiting.items())), stimulus_id)  # type: ignore[arg-type]


async def call_worker(caller: Client | Scheduler | Worker, address: str, handler: str, /, **arguments: Any) -> Any:
    """Call an RPC handler of a worker; raises as `transport.ask_worker`."""
    answer = await getattr(caller.rpc(address), handler)(**arguments)
    if answer is None:
        raise ConnectionError(f"the worker at {address} has no handler {handler}")
    return answer


async def call_worker_through_scheduler(client: Client, address: str, handler: str, /, **arguments: Any) -> Any:
    """Call an RPC handler of a worker by way of the scheduler; raises as `transport.ask_worker_through_scheduler`."""
    if client.scheduler is None:
        raise ConnectionError("the client has no connection to its scheduler")
    message = {"op": handler, **arguments}
    answers = await client.scheduler.broadcast(msg=message, workers=[address], on_error="return")
    answer = answers.get(address)
    if isinstance(answer, OSError):
        raise answer
    if answer is None:
        raise ConnectionError(f"the worker at {address} has no handler {handler}")
    return answer


async def call_scheduler(client: Client, handler: str, /, **arguments: Any) -> Any:
    """Call an RPC handler of the scheduler; raises as `transport.ask_scheduler`."""
    if client.scheduler is None:
        raise ConnectionError("the client has no connection to its scheduler")
    return await call_over(client.scheduler, handler, **arguments)


async def call_over(connection: Any, handler: str, /, **arguments: Any) -> Any:
    """`call_scheduler` over the connection of a client or of a cluster object (``scheduler_comm``)."""
    answer = await getattr(connection, handler)(**arguments)
    if answer is None:  # Dask's answer to an operation that it does not know; ours never answer None
        raise RuntimeError(f"the scheduler has no handler {handler}: is the heddle plugin registered?")
    return answer


async def call_scheduler_at(address: str, connection_args: Mapping[str, Any], handler: str, /, **arguments: Any) -> Any:
    """`call_scheduler` over a new connection to an address."""
    async with rpc(address, connection_args=connection_args) as scheduler:
        return await call_over(scheduler, handler, **arguments)


async def forget_worker_plugin(scheduler: Scheduler, name: str) -> bool:
    """Remove a plugin that a client has registered from all workers, and wait for their teardowns; False without one.

    A worker that dies meanwhile, or is silent, is not waited for; Dask's own call would fail, or wait.
    """
    if scheduler.worker_plugins.pop(name, None) is None:
        return False
    open_calls = {
        asyncio.ensure_future(getattr(scheduler.rpc(address), "plugin-remove")(name=name)): ws
        for address, ws in scheduler.workers.items()
    }
    while open_calls:
        done, _ = await asyncio.wait(open_calls, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        for call, ws in list(open_calls.items()):
            if call in done or time.time() - ws.last_seen > SILENT_S:
                del open_calls[call]
                call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
                call.cancel()
    return True


def heartbeats(scheduler: Scheduler, tags: set[str]) -> dict[str, float]:
    """When each worker with one of these resource tags was last heard of, by address."""
    return {a: ws.last_seen for a, ws in scheduler.workers.items() if not tags.isdisjoint(ws.resources)}


def left_as_asked(scheduler: Scheduler, address: str) -> bool:
    """Whether a worker that has just left was retired; else it was closed by its own side, or died."""
    told = (event for _, event in reversed(scheduler.get_events(address)) if isinstance(event, dict))
    return next((bool(event["expected"]) for event in told if event.get("action") == "remove-worker"), False)


def call_every(server: Scheduler | Worker, seconds: float, what: Callable[[], None]) -> None:
    """Call something on the loop of a scheduler or worker until that ends, in place of what was so called before."""
    if before := server.periodic_callbacks.pop("heddle", None):
        before.stop()
    server.periodic_callbacks["heddle"] = periodic = PeriodicCallback(what, seconds * 1000)
    periodic.start()


async def restart_worker(scheduler: Scheduler, address: str) -> None:
    """Have its nanny restart a worker; without one, or where that does not answer either, it is removed.

    Dask does the same after ``worker-ttl``, but orders a worker to close with its nanny if that does not answer: it
    would get the order after the cut of the network.
    """
    ws, why = scheduler.workers.get(address), "heddle-silence"
    if ws is None:
        return
    if ws.nanny:
        with contextlib.suppress(OSError):
            async with asyncio.timeout(SILENT_S), rpc(ws.nanny, connection_args=scheduler.connection_args) as nanny:
                await nanny.kill(reason=why)
                return
    await scheduler.remove_worker(address, stimulus_id=why, close=not ws.nanny)


def ask_before_loss_ends_nanny(worker: Worker, goes_on: Callable[[], Awaitable[bool]]) -> None:
    """Ask before a worker closes with its nanny by itself, because the scheduler has gone or does not know it any more.

    Parameters
    ----------
    goes_on
        Whether the scheduler goes on: then the worker closes alone, and its nanny starts it again.
    """
    if not worker.nanny or "close" in vars(worker):
        return
    close = worker.close

    async def close_unless_ordered(
        timeout: float = 30, executor_wait: bool = True, nanny: bool = True, reason: str = "worker-close"
    ) -> str | None:
        if nanny and reason in ("worker-heartbeat-missing", "worker-handle-scheduler-connection-broken"):
            nanny = not await goes_on()
        # What the scheduler orders goes to Dask's own method, and has come first perhaps.
        return await close(timeout, executor_wait, nanny, reason)

    worker.close = close_unless_ordered  # type: ignore[method-assign]


async def publish_resource(worker: Worker, name: str, units: float) -> None:
    """Tell the scheduler of a resource; it does not know a worker that leaves any more, and would log a KeyError."""
    leaves = (Status.closing_gracefully, Status.closing, Status.closed, Status.failed)
    if worker.status not in leaves:
        await worker.set_resources(**{name: units})


def pass_over_resources_of_removed(scheduler: Scheduler) -> None:
    """Let a worker that the scheduler has just removed tell of its resources: Dask raises a KeyError, at the worker."""

    def set_resources(worker: str, resources: dict[str, float] | None = None) -> str:
        return scheduler.add_resources(worker, resources) if worker in scheduler.workers else "OK"

    scheduler.handlers["set_resources"] = set_resources


def set_event(scheduler: Scheduler, name: str) -> None:
    """Set a `distributed.Event`, from the scheduler."""
    scheduler.extensions["events"].event_set(name)


async def event_is_set(peer: Worker | Client, name: str, *, wait: bool = False) -> bool:
    """Whether a `distributed.Event` is set, perhaps once it is; an OSError when the connection breaks meanwhile."""
    scheduler: Any = peer.scheduler
    return bool(await (scheduler.event_wait if wait else scheduler.event_is_set)(name=name))


def results_needed(worker: WorkerState) -> int:
    """Results that only this worker has, and that a client or another task still needs."""
    return sum(len(ts.who_has or ()) < 2 and bool(ts.who_wants or ts.waiters) for ts in worker.has_what)


def _tune(stream: BatchedSend, interval_s: float) -> None:
    """Send sooner, keep nothing, and pack at once.

    Dask keeps the last 1,000 messages of each stream, with all that tasks carry. It estimates the size of each message
    before it packs it, since more than 10 MB would be packed in a thread; what is so long takes other ways here.
    """
    stream.interval = interval_s
    stream.recent_message_log = deque(maxlen=0)
    if stream.comm is not None:
        stream.comm.allow_offload = False


NAMES_S = 10.0
"""Seconds between two looks of a worker at `forget_task_names`."""


def forget_task_names(most: int = 4096) -> None:
    """Empty Dask's cache of task names when it has more: it keeps 100,000 whole keys, and ours are each used once."""
    if key_split.cache_info().currsize > most:
        key_split.cache_clear()


def shorten_worker_interval(scheduler: Scheduler, address: str, interval_s: float) -> None:
    """Let messages to this worker wait at most `interval_s` for others (Dask's default: 5 ms)."""
    stream = scheduler.stream_comms.get(address)
    if stream is not None:
        _tune(stream, interval_s)


def shorten_client_report_interval(scheduler: Scheduler, client_id: str, interval_s: float) -> None:
    """Let messages to this client wait at most `interval_s` (Dask's default: 2 ms)."""
    stream = scheduler.client_comms.get(client_id)
    if stream is not None:
        _tune(stream, interval_s)


def shorten_own_interval(peer: Worker | Client, interval_s: float) -> None:
    """Let messages of this worker or client to the scheduler wait at most `interval_s`."""
    stream = peer.batched_stream if isinstance(peer, Worker) else peer.scheduler_comm
    if stream is not None:
        _tune(stream, interval_s)


def task_annotation(worker: Worker, key: Any) -> Mapping[str, Any]:
    """What `pin` attached to the task of this key, read on the worker that runs it."""
    ts = worker.state.tasks.get(key)
    annotations = ts.annotations if ts is not None else None
    found: Mapping[str, Any] = (annotations or {}).get(ANNOTATION, {})
    return found
