"""Submits steps and actions as Dask futures, many at a time, and brings their results.

Everything that is asked for in one turn of the event loop goes out as one graph: the scheduler's cost per graph
is several times its cost per task. A result that its worker has pushed is taken at once; its future is released when
the scheduler has told of it too. What a trajectory asks for next carries the end of the step before, in case that
request is the first that the scheduler hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import dask
from distributed import Client, Future
from distributed.client import FutureCancelledError

from heddle_dask.live.wire._dask_internals import HOLD_RESOURCE, send_from_client, settled
from heddle_dask.live.wire.messages import (
    ACTION_PREFIX,
    ACTION_RESULTS,
    STEP_PREFIX,
    STEP_RESULTS,
    ActionCall,
    ActionOutcome,
    Key,
    PerKey,
    StepCall,
    StepEnd,
    StepResult,
    step_end,
)
from heddle_dask.live.wire.result_push import PATIENCE_S, Inbox
from heddle_dask.live.worker.rollout_worker import run_step
from heddle_dask.live.worker.tool_worker import run_action

# A batch of long prompts goes out as several graphs: the first steps start while the others are on their way, and the
# scheduler answers in between. Dask itself warns from 10 MB on.
GRAPH_BYTES = 2 << 20

_RESULTS_OF = {STEP_PREFIX: STEP_RESULTS, ACTION_PREFIX: ACTION_RESULTS}


class Interrupted(Exception):
    """A step or action will not come back: given up, or its result was lost. `kind` and `cause` say why."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind
        self.cause = cause


class Submitter:
    """One per driver; belongs to the client's event loop."""

    def __init__(self, client: Client, session: str) -> None:
        self._client = client
        self._inbox = Inbox(client, session)
        self._pending: dict[Callable[..., Any], list[tuple[Any, list[Any]]]] = {}
        self._submitted: dict[Key, asyncio.Future[Future]] = {}
        self._fetching: dict[Key, asyncio.Future[Any]] = {}
        self._interrupts: dict[Key, Interrupted] = {}
        # Futures whose result was pushed and of which the scheduler has not told yet.
        self._early: dict[Key, Future] = {}
        # By trajectory, the end of a step of which the scheduler may not know yet.
        self._news: dict[str, tuple[Key, StepEnd]] = {}
        self._settling: set[asyncio.Task[None]] = set()

    async def step(self, call: StepCall, request: Sequence[Any]) -> StepResult:
        """Run a step. `request` holds the fields of its `StepRequest`.

        Raises
        ------
        Interrupted
            The controller gave it up, or its result was lost.
        """
        try:
            result: StepResult = await self._run(run_step, call, request, call.step_id.trajectory_id)
        except asyncio.CancelledError:
            # After what was submitted in this turn of the loop: the scheduler must know the step before.
            asyncio.get_running_loop().call_soon(self._tell_cancelled, call)
            raise
        self._inbox.listen(result.address, STEP_RESULTS)
        if call.key in self._early:
            self._news[call.step_id.trajectory_id] = call.key, step_end(call, result)
        return result

    async def action(self, call: ActionCall, request: Sequence[Any]) -> ActionOutcome:
        """Run an action. `request` holds the fields of its `ActionRequest`.

        Raises
        ------
        Interrupted
            The controller gave it up, or its result was lost.
        """
        result: ActionOutcome = await self._run(run_action, call, request, request[1])
        self._inbox.listen(result.address, ACTION_RESULTS)
        return result

    def news_of(self, trajectory_id: str) -> StepEnd | None:
        """The end of this trajectory's last step, if the scheduler may not know of it; asked once, then forgotten."""
        _, end = self._news.pop(trajectory_id, (None, None))
        return end

    async def close(self) -> None:
        """Stop listening to the workers."""
        await self._inbox.close()
        settling = list(self._settling)
        for task in settling:
            task.cancel()
        if settling:
            await asyncio.wait(settling)

    def interrupt(self, key: Key, kind: str, cause: str) -> None:
        """Raise `Interrupted` where the result of this key is awaited; one that is here already stays."""
        fetching = self._fetching.get(key)
        if fetching is None:
            self._release_early(key)
        elif key not in self._interrupts:
            self._interrupts[key] = Interrupted(kind, cause)
            fetching.cancel()

    async def _run(
        self, task: Callable[..., Any], call: Any, request: Sequence[Any], trajectory_id: str
    ) -> Any:
        key = call.key
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        row = [list(request), self.news_of(trajectory_id)]
        self._pending.setdefault(task, []).append((call, row))
        submitted: asyncio.Future[Future] = asyncio.get_running_loop().create_future()
        self._submitted[key] = submitted
        self._inbox.expect(key)
        try:
            return await self._result(key, await submitted)
        finally:
            self._inbox.forget(key)

    async def _result(self, key: Key, future: Future) -> Any:
        settling = asyncio.ensure_future(settled(future))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)
        fetching = asyncio.ensure_future(self._fetch(key, future, settling))
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
                # The scheduler has gone, and with it every future: the control channel ends the run. Until then
                # nothing must be taken for the program's own failure.
                await asyncio.Event().wait()
            raise
        finally:
            del self._fetching[key]
        self._early[key] = future
        settling.add_done_callback(lambda _: self._release_early(key))
        return result

    async def _fetch(self, key: Key, future: Future, settling: asyncio.Task[None]) -> Any:
        handler = _RESULTS_OF[key[0]]
        arrival = self._inbox.arrival(key)
        await asyncio.wait({arrival, settling}, return_when=asyncio.FIRST_COMPLETED)
        if not arrival.done() and future.status == "finished" and self._inbox.listens(handler):
            await asyncio.wait({arrival}, timeout=PATIENCE_S)
        if arrival.done():
            return arrival.result()
        # A gather that is cancelled while it waits leaves noise behind: this one has nothing to wait for.
        return await self._client.gather(future, direct=True, asynchronous=True)

    def _tell_cancelled(self, call: StepCall) -> None:
        message = {"op": "heddle-step-cancelled", "session": call.session, "step_id": list(call.step_id)}
        if self._client.status == "running":
            send_from_client(self._client, message)

    def _release_early(self, key: Key) -> None:
        """The scheduler has told of this result, or will never."""
        future = self._early.pop(key, None)
        if future is not None:
            future.release()
        # With its own report of the end, which comes first, the scheduler needs ours no more.
        trajectory_id = key[2]
        if self._news.get(trajectory_id, (None,))[0] == key:
            del self._news[trajectory_id]

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for task, rows in pending.items():
            for part in _parts(rows):
                self._submit(task, part)

    def _submit(self, task: Callable[..., Any], rows: Sequence[tuple[Any, list[Any]]]) -> None:
        calls = [call for call, _ in rows]
        keys = [call.key for call in calls]
        requests = PerKey({call.key: row for call, row in rows})
        # The resource that nobody has: without our plugin, or after it has failed, nothing runs by accident.
        with dask.annotate(heddle=requests):
            futures = self._client.map(task, calls, key=keys, pure=False, resources={HOLD_RESOURCE: 1})
        for key, future in zip(keys, futures, strict=True):
            submitted = self._submitted.pop(key)
            if submitted.done():
                future.release()  # the trajectory was cancelled in the same turn of the loop
            else:
                submitted.set_result(future)


def _parts(rows: Sequence[tuple[Any, list[Any]]]) -> Iterator[Sequence[tuple[Any, list[Any]]]]:
    """The rows in their order, each part small enough for one graph."""
    first = taken_bytes = 0
    for number, (call, _) in enumerate(rows):
        if number > first and taken_bytes + call.body_bytes > GRAPH_BYTES:
            yield rows[first:number]
            first, taken_bytes = number, 0
        taken_bytes += call.body_bytes
    yield rows[first:]
