"""The tool worker: a Dask worker that runs actions, many at a time, on its event loop.

The plugin takes effect on workers that carry the resource ``TOOL`` (one unit per CPU). The controller grants
CPUs and a host before an action is dispatched, so no action waits here.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from typing import Any

import cloudpickle
from distributed import Status, Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin

from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.nouns import HostDescription
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.messages import (
    STREAM_INTERVAL_S,
    TOOL_RESOURCE,
    ActionCall,
    ActionOutcome,
    ActionPlacement,
    ActionStatus,
    Key,
    action_key,
    too_large,
)
from heddle_dask.live.wire.result_push import Outbox
from heddle_dask.live.wire.transport import Done, Handlers, send
from heddle_dask.live.wire.worker_messages import (
    AbortActionOrder,
    ActionEndedReport,
    ActionPayloadWantedReport,
    ActionResults,
    FetchActionResults,
    HostLostReport,
    HostReadyReport,
    PushedAction,
    PutActionPayload,
)
from heddle_dask.live.worker.tool_fork_server import accepted, one_line
from heddle_dask.live.worker.tool_processes import ToolProcessEnded, ToolProcesses, ToolRaised

PLUGIN_NAME = "heddle-tool-worker"
# Ended actions that are remembered: an order to abort one of them may be on its way.
ENDED_KEPT = 10_000


async def run_action(call: ActionCall) -> ActionOutcome:
    """The Dask task of one action."""
    worker = get_worker()
    plugin = worker.plugins.get(PLUGIN_NAME)
    if not isinstance(plugin, ToolWorker):
        raise RuntimeError(f"worker {worker.address} has no {PLUGIN_NAME} plugin")
    return await plugin.run_action(call)


class ToolWorker(WorkerPlugin):
    """Runs actions on every worker tagged ``TOOL``."""

    name = PLUGIN_NAME

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self._reports: dict[Key, ActionEndedReport] = {}
        self._ended: dict[Key, None] = {}

    def setup(self, worker: Worker) -> None:
        """Announce the host to the scheduler plugin."""
        cpus = int(worker.state.total_resources.get(TOOL_RESOURCE, 0))
        if cpus < 1:
            return
        self.worker = worker
        collect_seldom()
        self._threads = dask.bound_threads(worker, os.cpu_count() or 1)
        self.host_id = HostId(f"{worker.name}/{os.getpid()}")
        self._processes = ToolProcesses()
        self._processes.start()
        self._running: dict[Key, asyncio.Task[Any]] = {}
        self._payloads: dict[Key, asyncio.Future[bytes]] = {}
        self._outbox: Outbox[PushedAction] = Outbox()
        handlers = Handlers()
        handlers.answer(FetchActionResults, self.action_results)
        handlers.answer(PutActionPayload, self.put_payload)
        handlers.take(AbortActionOrder, self.abort_action)
        handlers.add_to(worker)
        dask.shorten_own_interval(worker, STREAM_INTERVAL_S)
        send(worker, HostReadyReport(HostDescription(self.host_id, cpus)))

    async def teardown(self, worker: Worker) -> None:
        """Report the loss of the host, and end the processes of plain functions."""
        if self.worker is not None:
            send(worker, HostLostReport(self.host_id))
            dask.restore_threads(worker, self._threads)
            await self._processes.close()

    async def run_action(self, call: ActionCall) -> ActionOutcome:
        """Run the function; whatever it does ends in an `ActionOutcome`.

        An action that runs when its worker closes has no outcome: it is lost with its host, and runs again on another.
        """
        assert self.worker is not None
        placement = ActionPlacement.from_wire(dask.task_annotation(self.worker, call.key))
        cpus = placement.cpus
        started_s = time.perf_counter()
        task = asyncio.ensure_future(self._call(call, cpus))
        self._running[call.key] = task
        try:
            status, value, message, detail = await self._outcome(task, call)
        finally:
            del self._running[call.key]
            self._note_ended(call.key)
        run_s = time.perf_counter() - started_s
        address = self.worker.address
        outcome = ActionOutcome(
            status, value, _encodable(message), _encodable(detail), self.host_id, cpus, run_s, address
        )
        action_id = ActionId(call.action_id)
        self._reports[call.key] = ActionEndedReport(
            call.session, action_id, placement.host_id, run_s, ok=status == "ok"
        )
        self._outbox.put(call.session, PushedAction(action_id, outcome))
        return outcome

    def _note_ended(self, key: Key) -> None:
        self._ended[key] = None
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Report an action that has ended in the same message as Dask's own report, and before it."""
        report = self._reports.pop(key, None)
        if report is not None and self.worker is not None:
            send(self.worker, report)

    async def action_results(self, request: FetchActionResults) -> ActionResults:
        """Long poll of the driver."""
        return ActionResults(await self._outbox.take(request.session))

    async def _outcome(
        self, task: asyncio.Task[bytes], call: ActionCall
    ) -> tuple[ActionStatus, bytes, str, str]:
        try:
            value = await asyncio.wait_for(task, call.timeout_s)
            if len(value) > call.max_bytes:
                return "raised", b"", too_large("value", len(value), call.max_bytes), ""
            return "ok", value, "", ""
        except TimeoutError as error:
            if task.cancelled():
                return "timeout", b"", f"it ran past its limit of {call.timeout_s} s", ""
            return "raised", b"", one_line(error), traceback.format_exc()
        except ToolRaised as error:
            return "raised", b"", str(error), error.detail
        except ToolProcessEnded as error:
            return "raised", b"", str(error), ""
        except asyncio.CancelledError:
            assert self.worker is not None
            # Dask cancels what runs on a worker that closes, and schedules it again.
            if not task.cancelled() or self.worker.status is Status.closing:
                raise
            return "aborted", b"", "its trajectory ended", ""
        except Exception as error:
            return "raised", b"", one_line(error), traceback.format_exc()

    async def _call(self, call: ActionCall, cpus: int) -> bytes:
        payload = await self._payload(call)
        offered = {"cpus": cpus, "idempotency_key": call.idempotency_key}
        if not call.on_loop:
            return await self._processes.run(payload, offered)
        function, args, kwargs = cloudpickle.loads(payload)
        value = await function(*args, **{**kwargs, **accepted(function, offered)})
        pickled: bytes = cloudpickle.dumps(value)
        return pickled

    async def _payload(self, call: ActionCall) -> bytes:
        """What the action calls; a long one comes from the driver, and never through the scheduler."""
        if call.payload is not None:
            return call.payload
        assert self.worker is not None
        arrival: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._payloads[call.key] = arrival
        try:
            send(self.worker, ActionPayloadWantedReport(call.session, ActionId(call.action_id)))
            return await arrival
        finally:
            del self._payloads[call.key]

    async def put_payload(self, request: PutActionPayload) -> Done:
        """The driver sends what a running action waits for."""
        arrival = self._payloads.get(action_key(request.session, request.action_id))
        if arrival is not None and not arrival.done():
            arrival.set_result(request.payload)
        return Done()

    def abort_action(self, sender: str, order: AbortActionOrder) -> None:
        """Cancel a running action; its process, or the whole tree of its sandbox, is killed then.

        An action that has not come here yet was cancelled before it could start. No task will report its end, so the
        worker tells the controller that its CPUs are free.
        """
        key = action_key(order.session, order.action_id)
        task = self._running.get(key)
        if task is not None:
            task.cancel()
        elif self.worker is not None and key not in self._ended:
            report = ActionEndedReport(
                order.session, order.action_id, self.host_id, run_s=0.0, ok=False, ran=False
            )
            send(self.worker, report)


def _encodable(text: str) -> str:
    """The text with lone surrogates written out: msgpack refuses them, and would break the connection."""
    return text.encode("utf-8", "backslashreplace").decode()
