"""The tool worker: a Dask worker that runs actions, many at a time, on its event loop.

The plugin takes effect on workers that carry the resource ``TOOL`` (one unit per CPU). The controller grants
CPUs and a host before an action is dispatched, so no action waits here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any, cast

from distributed import Status, Worker, get_worker
from distributed.comm import get_address_host
from distributed.diagnostics.plugin import WorkerPlugin

from heddle_dask.core.commands import AbortAction, CloseSandbox
from heddle_dask.core.errors import encodable_text
from heddle_dask.core.events import SERVICE_LOST, ActionFinished, HostLost
from heddle_dask.core.ids import ActionId, HostId
from heddle_dask.core.nouns import HostDescription
from heddle_dask.core.resources import CPU_POOL, CPUS, Resources
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.model_services.spec import ServiceFailed
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.wire.gateway_messages import GatewayAnswer, GatewaySessionEnded, StartGateway, TakeText
from heddle_dask.live.wire.messages import (
    POOL_VARIABLE,
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
from heddle_dask.live.wire.results import ResultReport, packed_result
from heddle_dask.live.wire.transport import Done, Handlers, guarded, send, tells_faults
from heddle_dask.live.wire.worker_messages import (
    ActionPayloadWantedReport,
    HostReadyReport,
    PutActionPayload,
)
from heddle_dask.live.worker.action_runner import ActionRunner
from heddle_dask.live.worker.allocator import keep_buffers
from heddle_dask.live.worker.announcements import Announcements
from heddle_dask.live.worker.cpu_pool import CoreLease, CpuPool
from heddle_dask.live.worker.gateway_host import GatewayHost
from heddle_dask.live.worker.process_calls import failure_of
from heddle_dask.live.worker.rejoin import comes_back
from heddle_dask.live.worker.running_call import LimitExceeded
from heddle_dask.live.worker.sandbox_host import close_sandbox, close_sandboxes, reap_stale_sandboxes
from heddle_dask.live.worker.tool_processes import ToolProcessEnded, ToolRaised, ToolServerEnded
from heddle_dask.sandbox.stateful.contract import ReplayDiffers, SandboxFailed
from heddle_dask.sandbox.stateful.keeper import SandboxMissing

PLUGIN_NAME = "heddle-tool-worker"
# Ended actions that are remembered: an order to abort one of them may be on its way.
ENDED_KEPT = 10_000


async def run_action(call: ActionCall) -> ActionOutcome:
    worker = get_worker()
    for plugin in worker.plugins.values():
        # On a worker for other work the plugin is there too, and does nothing.
        if isinstance(plugin, ToolWorker) and plugin.worker is not None:
            return await plugin.run_action(call)
    raise RuntimeError(f"worker {worker.address} has no {PLUGIN_NAME} plugin")


class ToolWorker(WorkerPlugin):
    """Runs actions on every worker tagged ``TOOL``."""

    name = PLUGIN_NAME

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self._reports: dict[Key, ResultReport] = {}
        self._ended: dict[Key, None] = {}

    async def setup(self, worker: Worker) -> None:
        resources = self.resources_of(worker.state.total_resources)
        if resources is None:
            return
        self.worker = worker
        comes_back(worker)
        collect_seldom()
        keep_buffers()
        self._threads = dask.bound_threads(worker, os.cpu_count() or 1)
        self.host_id = HostId(f"{worker.name}/{os.getpid()}")
        cpus = resources[CPUS]
        self.cores = CpuPool.of_worker(worker, cpus)
        self._runner = ActionRunner(self.cores)
        self.gateway = GatewayHost(
            self.host_id, get_address_host(worker.address), lambda message: send(worker, message)
        )
        self._running: dict[Key, asyncio.Task[Any]] = {}
        self._payloads: dict[Key, asyncio.Future[bytes]] = {}
        self._reaping = asyncio.ensure_future(reap_stale_sandboxes())
        self._fault = tells_faults(worker)
        handlers = Handlers(self._fault)
        handlers.answer(PutActionPayload, self.put_payload)
        handlers.take_order(AbortAction, self.abort_action)
        handlers.take_order(CloseSandbox, lambda _, command: close_sandbox(command.sandbox))
        handlers.answer(StartGateway, self.gateway.start)
        handlers.answer(TakeText, self.gateway.take_text)
        handlers.take(GatewayAnswer, self.gateway.answer)
        handlers.take(GatewaySessionEnded, self.gateway.session_ended)
        self.add_handlers(handlers)
        handlers.add_to(worker)
        dask.shorten_own_interval(worker, STREAM_INTERVAL_S)
        dask.call_every(worker, dask.NAMES_S, dask.forget_task_names)
        host = HostDescription(self.host_id, self.cores.resources if cpus else resources, self.pool)
        mechanism = self.cores.mechanism
        self._announcements = Announcements(worker)
        await self._announcements.begin()
        self._announcements.send(HostReadyReport(host, mechanism.text, mechanism.weaker if cpus else ""))

    @property
    def pool(self) -> str:
        """The kind of worker, as in ``Needs(pool=…)``."""
        return os.environ.get(POOL_VARIABLE) or CPU_POOL

    def resources_of(self, tags: Mapping[str, float]) -> Resources | None:
        """What a worker with these resource tags has for actions; None: it is a worker for other work."""
        cpus = int(tags.get(TOOL_RESOURCE, 0))
        return Resources.of(cpus=cpus) if cpus >= 1 else None

    def add_handlers(self, handlers: Handlers) -> None:
        """For other kinds of workers: handle more messages."""

    def offered(self, placement: ActionPlacement) -> dict[str, Any]:
        """Keyword arguments for functions that have parameters of these names."""
        return {"cpus": placement.cpus}

    async def teardown(self, worker: Worker) -> None:
        """Report the loss of the host, and end the processes of plain functions."""
        if self.worker is not None:
            self._announcements.send(Report("", HostLost(UNSTAMPED, self.host_id)))
            self._announcements.close()
            dask.restore_threads(worker, self._threads)
            await self._runner.close()
            await close_sandboxes()
            await self.gateway.close()

    async def run_action(self, call: ActionCall) -> ActionOutcome:
        """Run the function; whatever it does ends in an `ActionOutcome`.

        An action that runs when its worker closes has no outcome: it is lost with its host, and runs again on another.
        """
        assert self.worker is not None
        placement = ActionPlacement.from_wire(dask.task_annotation(self.worker, call.key))
        started_s = time.perf_counter()
        lease = CoreLease(placement.resources, placement.reach_cpus, placement.nice)
        task = asyncio.ensure_future(self._run(call, placement, lease))
        self._running[call.key] = task
        try:
            status, value, message, detail, retry_after_s = await self._outcome(task, call)
        finally:
            del self._running[call.key]
            self._note_ended(call.key)
        run_s = time.perf_counter() - started_s
        outcome = ActionOutcome(
            status,
            value,
            encodable_text(message),
            encodable_text(detail),
            self.host_id,
            placement.cpus,
            run_s,
            placement.quota_s,
            placement.load_s,
            "" if status == "ok" else lease.call.printed,
        )
        finished = ActionFinished(
            UNSTAMPED,
            ActionId(call.action_id),
            placement.host_id,
            run_s,
            ok=status == "ok",
            cause="" if status == "ok" else SERVICE_LOST if status == "lost" else status,
            retry_after_s=retry_after_s,
            used_tokens=lease.used_tokens,
            used_cost=lease.used_cost,
        )
        self._reports[call.key] = ResultReport(call.session, call.key, finished, packed_result(outcome))
        return outcome

    def _note_ended(self, key: Key) -> None:
        self._ended[key] = None
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def transition(self, key: Any, start: str, finish: str, **kwargs: Any) -> None:
        """Report an action that has ended in the same message as Dask's own report, and before it."""
        report = self._reports.pop(key, None)
        if report is not None and self.worker is not None:
            with guarded("the report of an action", report.session, self._fault):
                send(self.worker, report)

    async def _outcome(
        self, task: asyncio.Task[bytes], call: ActionCall
    ) -> tuple[ActionStatus, bytes, str, str, float | None]:
        try:
            value = await asyncio.wait_for(task, call.timeout_s)
            if len(value) > call.max_bytes:
                return "raised", b"", too_large("value", len(value), call.max_bytes), "", None
            return "ok", value, "", "", None
        except LimitExceeded as error:
            return error.cause, b"", str(error), "", None
        except ToolRaised as error:
            return error.cause, b"", str(error), error.detail, error.retry_after_s
        except SandboxMissing as error:
            return "sandbox-missing", b"", str(error), "", None
        except ReplayDiffers as error:
            return "sandbox-differs", b"", str(error), "", None
        except (SandboxFailed, ToolProcessEnded) as error:
            return "raised", b"", str(error), "", None
        except (ServiceFailed, ToolServerEnded) as error:
            return "lost", b"", str(error), "", None
        except asyncio.CancelledError:
            assert self.worker is not None
            # Dask cancels what runs on a worker that closes, and schedules it again.
            if not task.cancelled() or self.worker.status is Status.closing:
                raise
            return "aborted", b"", "its trajectory ended", "", None
        except Exception as error:
            if isinstance(error, TimeoutError) and task.cancelled():
                return "timeout", b"", f"it ran past its limit of {call.timeout_s} s", "", None
            line, detail, cause, retry_after_s = failure_of(error)
            return cast(ActionStatus, cause), b"", line, detail, retry_after_s

    async def _run(self, call: ActionCall, placement: ActionPlacement, lease: CoreLease) -> bytes:
        return await self._runner.run(call, lambda: self._payload(call), lease, self.offered(placement))

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

    def abort_action(self, session: str, command: AbortAction) -> None:
        """Cancel a running action; its process, or the whole tree of its sandbox, is killed then.

        An action that has not come here yet was cancelled before it could start. No task will report its end, so the
        worker tells the controller that its CPUs are free.
        """
        key = action_key(session, command.action_id)
        task = self._running.get(key)
        if task is not None:
            task.cancel()
        elif self.worker is not None and key not in self._ended:
            ended = ActionFinished(UNSTAMPED, command.action_id, self.host_id, run_s=0.0, ok=False, ran=False)
            send(self.worker, Report(session, ended))
