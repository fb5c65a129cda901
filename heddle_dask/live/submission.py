"""Submits steps and actions as Dask futures, many at a time, and brings their results.

Everything that is asked for in one turn of the event loop goes out as one graph: the scheduler's cost per graph
is several times its cost per task. A future is released as soon as its result is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import dask
from distributed import Client, Future
from distributed.client import FutureCancelledError

from heddle_dask.live._dask_internals import HOLD_RESOURCE, settled
from heddle_dask.live.direct_fetch import DirectFetch
from heddle_dask.live.messages import ActionCall, ActionOutcome, Key, PerKey, StepCall, StepResult
from heddle_dask.live.rollout_worker import run_step
from heddle_dask.live.tool_worker import run_action


class Interrupted(Exception):
    """A step or action will not come back: given up, or its result was lost. `kind` and `cause` say why."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind = kind
        self.cause = cause


class Submitter:
    """One per driver; belongs to the client's event loop."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._direct = DirectFetch(client)
        # Where the results of a trajectory's steps, and of actions, were found last.
        self._places: dict[str, str] = {}
        self._actions_have_one_place = True
        self._pending: dict[Callable[..., Any], list[tuple[Any, Sequence[Any]]]] = {}
        self._submitted: dict[Key, asyncio.Future[Future]] = {}
        self._gathering: dict[Key, asyncio.Future[Any]] = {}
        self._interrupts: dict[Key, Interrupted] = {}

    async def step(self, call: StepCall, request: Sequence[Any]) -> StepResult:
        """Run a step. `request` holds the fields of its `StepRequest`.

        Raises
        ------
        Interrupted
            The controller gave it up, or its result was lost.
        """
        place = self._places.get(call.trajectory_id)
        result: StepResult = await self._run(run_step, call, request, place)
        self._places[call.trajectory_id] = result.address
        return result

    def forget(self, trajectory_id: str) -> None:
        """The trajectory has ended."""
        self._places.pop(trajectory_id, None)

    async def action(self, call: ActionCall, request: Sequence[Any]) -> ActionOutcome:
        """Run an action. `request` holds the fields of its `ActionRequest`.

        Raises
        ------
        Interrupted
            The controller gave it up, or its result was lost.
        """
        place = self._places.get("") if self._actions_have_one_place else None
        result: ActionOutcome = await self._run(run_action, call, request, place)
        self._actions_have_one_place &= self._places.setdefault("", result.address) == result.address
        return result

    def interrupt(self, key: Key, kind: str, cause: str) -> None:
        """Raise `Interrupted` where the result of this key is awaited."""
        gathering = self._gathering.get(key)
        if gathering is not None and key not in self._interrupts:
            self._interrupts[key] = Interrupted(kind, cause)
            gathering.cancel()

    async def _run(
        self, task: Callable[..., Any], call: Any, request: Sequence[Any], place: str | None
    ) -> Any:
        key = call.key
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.setdefault(task, []).append((call, request))
        submitted: asyncio.Future[Future] = asyncio.get_running_loop().create_future()
        self._submitted[key] = submitted
        future = await submitted
        gathering = asyncio.ensure_future(self._fetch(future, place))
        self._gathering[key] = gathering
        try:
            return await gathering
        except (asyncio.CancelledError, FutureCancelledError) as error:
            interrupt = self._interrupts.pop(key, None)
            if interrupt is not None:
                raise interrupt from None
            if isinstance(error, FutureCancelledError):
                # The scheduler has gone, and with it every future: the control channel ends the run. Until then
                # nothing must be taken for the program's own failure.
                await asyncio.Event().wait()
            raise
        finally:
            del self._gathering[key]
            future.release()

    async def _fetch(self, future: Future, place: str | None) -> Any:
        # Wait first, then gather: a gather that is cancelled while it waits leaves noise behind.
        await settled(future)
        if place is not None and future.status == "finished":
            key: Any = future.key
            found = await self._direct.get(key, place)
            if found is not None:
                return found
        return await self._client.gather(future, direct=True, asynchronous=True)

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for task, rows in pending.items():
            self._submit(task, rows)

    def _submit(self, task: Callable[..., Any], rows: Sequence[tuple[Any, Sequence[Any]]]) -> None:
        calls = [call for call, _ in rows]
        keys = [call.key for call in calls]
        requests = PerKey({call.key: list(request) for call, request in rows})
        # The resource that nobody has: without our plugin, or after it has failed, nothing runs by accident.
        with dask.annotate(heddle=requests):
            futures = self._client.map(task, calls, key=keys, pure=False, resources={HOLD_RESOURCE: 1})
        for key, future in zip(keys, futures, strict=True):
            submitted = self._submitted.pop(key)
            if submitted.done():
                future.release()  # the trajectory was cancelled in the same turn of the loop
            else:
                submitted.set_result(future)
