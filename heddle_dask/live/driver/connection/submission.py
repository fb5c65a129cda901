"""Submits steps and actions as Dask futures, many at a time, and brings their results.

Everything that is asked for in one turn of the event loop goes out as one graph: the scheduler's cost per graph
is several times its cost per task. A result that its worker has pushed is taken at once; its future is released when
the scheduler has reported it too. Until then the trajectory's next request carries the end of the step (a piggybacked
step end), since it may reach the scheduler before the worker's report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dask
from distributed import Client, Future
from distributed.client import FutureCancelledError

from heddle_dask.core.events import SandboxClosed, StepCancelled, StepDelivered, TrajectoryForked
from heddle_dask.core.ids import StepId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, StepRequest, TrajectorySpec
from heddle_dask.live.driver.connection.long_payloads import LongPayloads
from heddle_dask.live.wire._dask_internals import ANNOTATION, HOLD_RESOURCE, settled
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.wire.messages import (
    ActionCall,
    ActionOutcome,
    Key,
    PerKey,
    StepCall,
    StepResult,
    Submission,
    named_by,
    step_end,
)
from heddle_dask.live.wire.result_push import PUSH_TIMEOUT_S, FetchResults, Inbox
from heddle_dask.live.wire.transport import send
from heddle_dask.live.wire.worker_messages import FetchActionResults, FetchStepResults
from heddle_dask.live.worker.rollout_worker import run_step
from heddle_dask.live.worker.tool_worker import run_action

# A batch of long prompts goes out as several graphs: the first steps start while the others are on their way, and the
# scheduler answers polls in between. Dask itself warns from 10 MB on.
GRAPH_BYTES = 2 << 20

StepTask = Callable[[StepCall], Coroutine[Any, Any, StepResult]]
ActionTask = Callable[[ActionCall], Coroutine[Any, Any, ActionOutcome]]


@dataclass(frozen=True, slots=True)
class _Row:
    """A call that waits to be submitted, and its annotation."""

    call: StepCall | ActionCall
    submission: Submission


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
        self._inbox = Inbox(client, session, self._arrived_late)
        # Takes the trajectory of a step that was cancelled and the tokens that it had sampled, when they are known:
        # its engine answers after the trajectory has ended.
        self.on_discarded: Callable[[TrajectoryId, int], None] = lambda trajectory_id, tokens: None
        self._cancelled: dict[Key, None] = {}
        self._pending: dict[StepTask | ActionTask, list[_Row]] = {}
        self._submitted: dict[Key, asyncio.Future[Future]] = {}
        self._fetching: dict[Key, asyncio.Future[Any]] = {}
        self._interrupts: dict[Key, Interrupted] = {}
        # Futures that have a pushed result and that the scheduler has not reported as finished.
        self._early: dict[Key, Future] = {}
        # By trajectory, the end of a step that the scheduler may not know of yet.
        self._piggybacked_ends: dict[str, StepDelivered] = {}
        self._settling: set[asyncio.Task[Any]] = set()
        self._payloads = LongPayloads(client, session)

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
            submission = self._submission(request, call.step_id.trajectory_id)
            result: StepResult = await self._run(run_step, call, submission, FetchStepResults)
        except (asyncio.CancelledError, Interrupted) as error:
            if isinstance(error, asyncio.CancelledError) or error.kind == "cancelled":
                # After what was submitted in this turn of the loop: the scheduler must know the step before.
                asyncio.get_running_loop().call_soon(self._tell_cancelled, call)
            raise
        self._inbox.listen(result.address, FetchStepResults)
        if call.key in self._early:
            self._piggybacked_ends[call.step_id.trajectory_id] = step_end(StepDelivered, call, result)
        return result

    async def action(self, call: ActionCall, request: ActionRequest) -> ActionOutcome:
        """Run an action, placed as its request says.

        Raises
        ------
        Interrupted
            The controller gave it up, its result was lost, or its task was cancelled.
        """
        submission = self._submission(request, request.trajectory_id)
        with self._payloads.kept(call) as sent:
            result: ActionOutcome = await self._run(run_action, sent, submission, FetchActionResults)
        self._inbox.listen(result.address, FetchActionResults)
        return result

    def send_payload(self, action_id: str, address: str) -> None:
        """Send the payload that was kept back to the worker on which its action runs."""
        self._payloads.send(action_id, address)

    def take_piggybacked_end(self, trajectory_id: str) -> StepDelivered | None:
        """The end of this trajectory's last step, if the scheduler may not know of it; each end is given once."""
        return self._piggybacked_ends.pop(trajectory_id, None)

    async def close(self) -> None:
        """Stop listening to the workers."""
        await self._inbox.close()
        await self._payloads.close()
        settling = list(self._settling)
        for task in settling:
            task.cancel()
        if settling:
            await asyncio.wait(settling)

    def interrupt(self, key: Key, kind: InterruptKind, cause: str) -> None:
        """Raise `Interrupted` where the result of this key is awaited; a result that has arrived stays."""
        fetching = self._fetching.get(key)
        if fetching is None:
            self._release_early(key)
        elif key not in self._interrupts:
            self._interrupts[key] = Interrupted(kind, cause)
            fetching.cancel()

    def _submission(self, request: StepRequest | ActionRequest, trajectory_id: str) -> Submission:
        return Submission(request, self.take_piggybacked_end(trajectory_id))

    async def _run(
        self,
        task: StepTask | ActionTask,
        call: StepCall | ActionCall,
        submission: Submission,
        kind: FetchResults,
    ) -> Any:
        key = call.key
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.setdefault(task, []).append(_Row(call, submission))
        submitted: asyncio.Future[Future] = asyncio.get_running_loop().create_future()
        self._submitted[key] = submitted
        self._inbox.expect(key)
        try:
            return await self._result(key, await submitted, kind)
        except asyncio.CancelledError:
            if isinstance(call, StepCall):
                self._discard(key)
            raise
        finally:
            self._inbox.forget(key)

    def _discard(self, key: Key) -> None:
        """A step was cancelled: its answer, which may have come in this turn of the loop, is counted and dropped."""
        self._cancelled[key] = None
        if len(self._cancelled) > _KEPT_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        arrival = self._inbox.arrival(key)
        if arrival.done():
            self._arrived_late(key, arrival.result())

    def _arrived_late(self, key: Key, result: StepResult | ActionOutcome) -> None:
        if key not in self._cancelled or not isinstance(result, StepResult):
            return
        del self._cancelled[key]
        named = named_by(key)
        tokens = len(result.generated.token_ids)
        if tokens and isinstance(named, StepId):
            self.on_discarded(named.trajectory_id, tokens)

    async def _result(self, key: Key, future: Future, kind: FetchResults) -> Any:
        settling = asyncio.ensure_future(settled(future))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        fetching = asyncio.ensure_future(self._fetch(key, future, settling, kind))
        self._fetching[key] = fetching
        try:
            result = await fetching
        except (asyncio.CancelledError, FutureCancelledError) as error:
            settling.cancel()
            future.release()
            interrupt = self._interrupts.pop(key, None)
            if interrupt is not None:
                raise interrupt from None
            if isinstance(error, FutureCancelledError):
                if self._client.status == "running":
                    raise Interrupted("cancelled", CANCELLED) from None
                # The scheduler has gone, and with it every future: the control channel ends the run. Until then
                # this must not look like a failure of the program.
                await asyncio.Event().wait()
            raise
        finally:
            del self._fetching[key]
        self._early[key] = future
        settling.add_done_callback(lambda _: self._release_early(key))
        return result

    async def _fetch(self, key: Key, future: Future, settling: asyncio.Task[None], kind: FetchResults) -> Any:
        arrival = self._inbox.arrival(key)
        await asyncio.wait({arrival, settling}, return_when=asyncio.FIRST_COMPLETED)
        if not arrival.done() and future.status == "finished" and self._inbox.listens(kind):
            await asyncio.wait({arrival}, timeout=PUSH_TIMEOUT_S)
        if arrival.done():
            return arrival.result()
        # Gathers that begin at the same time share one request in Dask: were this one cancelled, all of them would be,
        # and the programs of the others would end as if they had been interrupted.
        gathering = asyncio.ensure_future(self._client.gather(future, direct=True, asynchronous=True))
        self._settling.add(gathering)
        gathering.add_done_callback(self._gathered)
        return await asyncio.shield(gathering)

    def _gathered(self, gathering: asyncio.Task[Any]) -> None:
        self._settling.discard(gathering)
        if not gathering.cancelled():
            gathering.exception()  # nobody waits for it any more, or it was raised where it is awaited

    def _tell_cancelled(self, call: StepCall) -> None:
        if self._client.status == "running":
            send(self._client, Report(call.session, StepCancelled(UNSTAMPED, call.step_id)))

    def _release_early(self, key: Key) -> None:
        """The scheduler has reported this result, or never will."""
        future = self._early.pop(key, None)
        if future is not None:
            future.release()
        # The worker's report reaches the scheduler before that: the end need not be repeated.
        named = named_by(key)
        if isinstance(named, StepId):
            end = self._piggybacked_ends.get(named.trajectory_id)
            if end is not None and end.step_id == named:
                del self._piggybacked_ends[named.trajectory_id]

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for task, rows in pending.items():
            for part in _parts(rows):
                self._submit(task, part)

    def _submit(self, task: StepTask | ActionTask, rows: Sequence[_Row]) -> None:
        calls = [row.call for row in rows]
        keys = [call.key for call in calls]
        submissions = PerKey({row.call.key: row.submission for row in rows})
        # A resource that no worker has: without our plugin, or after it has failed, nothing runs by accident.
        with dask.annotate(**{ANNOTATION: submissions}):
            futures = self._client.map(task, calls, key=keys, pure=False, resources={HOLD_RESOURCE: 1})
        for key, future in zip(keys, futures, strict=True):
            submitted = self._submitted.pop(key)
            if submitted.done():
                future.release()  # the trajectory was cancelled in the same turn of the loop
            else:
                submitted.set_result(future)


def _parts(rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    first = taken_bytes = 0
    for number, row in enumerate(rows):
        if number > first and taken_bytes + row.call.body_bytes > GRAPH_BYTES:
            yield rows[first:number]
            first, taken_bytes = number, 0
        taken_bytes += row.call.body_bytes
    yield rows[first:]
