"""Submits steps and actions as Dask futures, many at a time, and brings their results.

Everything that is asked for in one turn of the event loop goes out as one message. A result comes in the scheduler's
stream (`wire.results`), before Dask tells of the finished future; where it does not, it is fetched from its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from distributed import Client, Future
from distributed.client import FutureCancelledError

from heddle_dask.core.events import ActionCancelled, SandboxClosed, StepCancelled, TrajectoryForked
from heddle_dask.core.ids import ActionId, StepId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, StepRequest, TrajectorySpec
from heddle_dask.live.driver.connection.long_payloads import LongPayloads
from heddle_dask.live.wire._dask_internals import packed_run, told_future
from heddle_dask.live.wire.driver_messages import SubmitTasks, SubmittedTask
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.wire.messages import ActionCall, ActionOutcome, Key, StepCall, StepResult, named_by
from heddle_dask.live.wire.results import leave_results, take_results
from heddle_dask.live.wire.transport import send
from heddle_dask.live.worker.rollout_worker import run_step
from heddle_dask.live.worker.tool_worker import run_action

# A future whose result has come is released this much later, with others: the result has been used, and nobody waits.
RELEASE_S = 0.1

StepTask = Callable[[StepCall], Coroutine[Any, Any, StepResult]]
ActionTask = Callable[[ActionCall], Coroutine[Any, Any, ActionOutcome]]


InterruptKind = Literal["given-up", "result-lost", "cancelled"]
RESULT_LOST = "its worker died with the result"
# Cancelled steps whose partial answers may still come; a step that never came to a worker has none.
_KEPT_CANCELLED = 4096
CANCELLED = "a client of the cluster cancelled its task"


class Interrupted(Exception):
    """A step or action has no result."""

    def __init__(self, kind: InterruptKind, cause: str) -> None:
        super().__init__(cause)
        # ``"given-up"``: by the controller; ``"result-lost"``: its worker died with the result; ``"cancelled"``: by a
        # client of the cluster (`Client.cancel`). After the last two, it may be asked for again.
        self.kind = kind
        self.cause = cause  # one line


class Submitter:
    """One per driver; belongs to the client's event loop."""

    def __init__(self, client: Client, session: str) -> None:
        self._client = client
        self._session = session
        # Takes the trajectory of a step that was cancelled and the tokens that it had sampled, when they are known:
        # its engine answers after the trajectory has ended.
        self.on_discarded: Callable[[TrajectoryId, int], None] = lambda trajectory_id, tokens: None
        self._cancelled: dict[Key, None] = {}
        self._pending: list[SubmittedTask] = []
        self._awaited: dict[Key, asyncio.Future[Any]] = {}
        self._futures: dict[Key, Future] = {}
        self._arrived: list[Future] = []  # to be released
        self._gathering: set[asyncio.Task[None]] = set()
        self._payloads = LongPayloads(client, session)
        take_results(client, session, self._take)

    def fork(self, spec: TrajectorySpec, parent: TrajectoryId) -> None:
        """Announce a branch, before its first step or action is submitted: messages keep their order."""
        if self._client.status == "running":
            send(self._client, Report(self._session, TrajectoryForked(UNSTAMPED, spec, parent)))

    def close_sandbox(self, sandbox: str) -> None:
        """The program of a trajectory needs this sandbox no longer."""
        if self._client.status == "running":
            send(self._client, Report(self._session, SandboxClosed(UNSTAMPED, sandbox)))

    async def step(self, call: StepCall, request: StepRequest) -> StepResult:
        """Run a step, placed as its request says.

        Raises
        ------
        Interrupted
            The controller gave it up, its result was lost, or its task was cancelled.
        """
        try:
            result: StepResult = await self._run(run_step, call, request)
        except (asyncio.CancelledError, Interrupted) as error:
            if isinstance(error, asyncio.CancelledError) or error.kind == "cancelled":
                # After what was submitted in this turn of the loop: the scheduler must know the step before.
                asyncio.get_running_loop().call_soon(self._tell_cancelled, call)
            raise
        return result

    async def action(self, call: ActionCall, request: ActionRequest) -> ActionOutcome:
        """Run an action, placed as its request says.

        Raises
        ------
        Interrupted
            The controller gave it up, its result was lost, or its task was cancelled.
        """
        with self._payloads.kept(call) as sent:
            try:
                result: ActionOutcome = await self._run(run_action, sent, request)
            except asyncio.CancelledError:
                asyncio.get_running_loop().call_soon(self._tell_cancelled, call)
                raise
        return result

    def send_payload(self, action_id: str, address: str) -> None:
        """Send the payload that was kept back to the worker on which its action runs."""
        self._payloads.send(action_id, address)

    async def close(self) -> None:
        """Release all futures, and take no result any more."""
        leave_results(self._client, self._session)
        await self._payloads.close()
        gathering = list(self._gathering)
        for task in gathering:
            task.cancel()
        if gathering:
            await asyncio.wait(gathering)
        self._release_arrived()

    def interrupt(self, key: Key, kind: InterruptKind, cause: str) -> None:
        """Raise `Interrupted` where the result of this key is awaited; a result that has arrived stays."""
        self._fail(key, Interrupted(kind, cause))

    async def _run(
        self, task: StepTask | ActionTask, call: StepCall | ActionCall, request: StepRequest | ActionRequest
    ) -> Any:
        key, loop = call.key, asyncio.get_running_loop()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append(SubmittedTask(key, request, packed_run(task, call)))
        self._awaited[key] = arrival = loop.create_future()
        try:
            return await arrival
        except asyncio.CancelledError:
            if isinstance(call, StepCall):
                self._discard(key, arrival)
            raise
        finally:
            del self._awaited[key]
            self._release(key, with_others=arrival.done() and not arrival.cancelled() and arrival.exception() is None)

    def _discard(self, key: Key, arrival: asyncio.Future[Any]) -> None:
        """A step was cancelled: its answer, which may have come in this turn of the loop, is counted and dropped."""
        self._cancelled[key] = None
        if len(self._cancelled) > _KEPT_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        if arrival.done() and not arrival.cancelled() and arrival.exception() is None:
            self._arrived_late(key, arrival.result())

    def _take(self, key: Key, result: StepResult | ActionOutcome | Exception) -> None:
        arrival = self._awaited.get(key)
        if isinstance(result, Exception):
            self._fail(key, result)
        elif arrival is None:
            self._arrived_late(key, result)
        elif not arrival.done():
            arrival.set_result(result)

    def _arrived_late(self, key: Key, result: StepResult | ActionOutcome) -> None:
        if key not in self._cancelled or not isinstance(result, StepResult):
            return
        del self._cancelled[key]
        named = named_by(key)
        tokens = len(result.generated.token_ids)
        if tokens and isinstance(named, StepId):
            self.on_discarded(named.trajectory_id, tokens)

    def _fail(self, key: Key, error: BaseException) -> None:
        arrival = self._awaited.get(key)
        if arrival is not None and not arrival.done():
            arrival.set_exception(error)

    def _settled(self, key: Key, status: str) -> None:
        """The scheduler has told of a future; before that, it has sent a result that is not too long."""
        if key not in self._awaited or self._awaited[key].done():
            return
        if status == "cancelled":
            self._lost_future(key)
        else:
            gathering = asyncio.ensure_future(self._gather(key))
            self._gathering.add(gathering)
            gathering.add_done_callback(self._gathering.discard)

    async def _gather(self, key: Key) -> None:
        """Fetch a result from its worker.

        Nobody cancels it with its step: gathers that begin at the same time share one request in Dask.
        """
        try:
            self._take(key, await self._client.gather(self._futures[key], direct=True, asynchronous=True))
        except FutureCancelledError:
            self._lost_future(key)
        except Exception as error:
            self._fail(key, error)

    def _lost_future(self, key: Key) -> None:
        # Where the scheduler has gone, and with it every future, the control channel ends the run. Until then this
        # must not look like a failure of the program.
        if self._client.status == "running":
            self._fail(key, Interrupted("cancelled", CANCELLED))

    def _tell_cancelled(self, call: StepCall | ActionCall) -> None:
        if self._client.status != "running":
            return
        if isinstance(call, StepCall):
            send(self._client, Report(call.session, StepCancelled(UNSTAMPED, call.step_id)))
        else:
            send(self._client, Report(call.session, ActionCancelled(UNSTAMPED, ActionId(call.action_id))))

    def _release(self, key: Key, with_others: bool) -> None:
        future = self._futures.pop(key, None)
        if future is None:
            return
        if not with_others:
            future.release()  # its task may run: it is to end
            return
        if not self._arrived:
            asyncio.get_running_loop().call_later(RELEASE_S, self._release_arrived)
        self._arrived.append(future)

    def _release_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for future in arrived:
            future.release()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for row in pending:
            self._futures[row.key] = told_future(self._client, row.key, self._settled)
        send(self._client, SubmitTasks(self._session, tuple(pending)))
        for row in pending:
            if row.key not in self._awaited:  # the trajectory was cancelled in the same turn of the loop
                self._release(row.key, with_others=False)
