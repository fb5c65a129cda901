"""The steps that were asked for, by the clients that wait for them: which one a request repeats, and who has gone.

A request whose client has gone may come again. For some seconds its step goes on, and takes it; its answer, if it came
meanwhile, is kept for it. Equal requests of clients that all wait are not repeated: they are parallel samples.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from heddle_dask.chat.history import HistoryPath, HistoryPlace
from heddle_dask.gateway.orders import OrderRefused, StepAnswer, StepOrder

RequestKey = tuple[bytes, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """An order with what names its conversation.

    Attributes
    ----------
    variables
        Those of the template that its conversation needs.
    key
        Equal for orders that ask for the same.
    """

    order: StepOrder
    variables: dict[str, Any]
    path: HistoryPath
    key: RequestKey


@dataclass(slots=True, eq=False)
class AskedStep:
    """A step of one order, which one or more clients wait for, or nobody; those of a session are numbered from 0."""

    number: int
    request: AskedRequest
    place: HistoryPlace
    branch: int
    prompt_tokens: int
    task: asyncio.Task[StepAnswer] | None = None
    waiting: int = 0
    timer: asyncio.TimerHandle | None = None
    gives_up: bool = False

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def running(self) -> asyncio.Task[StepAnswer]:
        assert self.task is not None
        return self.task

    @property
    def has_failed(self) -> bool:
        return self.running.cancelled() or self.running.exception() is not None


class AskedSteps:
    """The steps of one session.

    Parameters
    ----------
    grace_s
        How long a step goes on whose clients have all gone.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._open: list[AskedStep] = []
        # Steps that nobody waits for, running or answered: the next equal request takes one.
        self._unclaimed: defaultdict[RequestKey, list[AskedStep]] = defaultdict(list)
        self._by_idempotency_key: dict[str, AskedStep] = {}

    def add(self, step: AskedStep) -> None:
        """A step that runs, for which a client waits."""
        self._open.append(step)
        name = step.request.order.idempotency_key
        if name:
            self._by_idempotency_key[name] = step
        step.waiting = 1
        step.running.add_done_callback(lambda task: self._ended(step))

    async def repeated(self, request: AskedRequest) -> AskedStep | None:
        """The step that this request repeats, if it does: its client waits for it.

        Raises
        ------
        OrderRefused
            Its idempotency key was used with another request.
        """
        while (step := self._equal_step(request)) is not None and step.gives_up:
            await asyncio.wait([step.running])
        if step is not None:
            step.waiting += 1
            self._unlist(step)
        return step

    def _equal_step(self, request: AskedRequest) -> AskedStep | None:
        name = request.order.idempotency_key
        if name and (known := self._by_idempotency_key.get(name)):
            if known.key != request.key:
                raise OrderRefused("the idempotency key was used with another request", "invalid_request")
            return known
        unclaimed = self._unclaimed.get(request.key)
        if unclaimed:
            return unclaimed[0]
        running = [step for step in self._open if step.key == request.key]
        return next((step for step in running if step.gives_up or request.order.is_retry), None)

    def leave(self, step: AskedStep) -> None:
        """A client of the step has gone."""
        step.waiting -= 1
        if step.waiting or step.gives_up:
            return
        if not step.running.done():
            step.timer = asyncio.get_running_loop().call_later(self._grace_s, self.abort, step)
        elif step.has_failed:
            return
        self._unclaimed[step.key].append(step)

    def abort(self, step: AskedStep) -> None:
        """Give a step up, if it runs."""
        self._unlist(step)
        if not step.running.done() and not step.gives_up:
            step.gives_up = True
            step.running.cancel()

    async def close(self) -> None:
        """Abort what runs."""
        for step in list(self._open):
            self.abort(step)
        if self._open:
            await asyncio.wait([step.running for step in self._open])

    def _unlist(self, step: AskedStep) -> None:
        if step.timer is not None:
            step.timer.cancel()
            step.timer = None
        unclaimed = self._unclaimed.get(step.key, [])
        if step in unclaimed:
            unclaimed.remove(step)
            if not unclaimed:
                del self._unclaimed[step.key]

    def _ended(self, step: AskedStep) -> None:
        self._open.remove(step)
        if step.has_failed:
            self._by_idempotency_key.pop(step.request.order.idempotency_key, None)
            self._unlist(step)
