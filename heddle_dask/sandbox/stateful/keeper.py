"""The sandboxes of one worker: made when they are first used, kept between operations, rebuilt from their past.

Belongs to one event loop. Operations of one sandbox wait for one another. An operation that is cancelled leaves its
sandbox in an unknown state: the sandbox is then rebuilt from its past, in which that operation is not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from heddle_dask.core.errors import HeddleError
from heddle_dask.sandbox.stateful.contract import (
    Command,
    ReplayDiffers,
    SandboxFailed,
    SandboxGone,
    SandboxSpec,
    StatefulSandbox,
)
from heddle_dask.sandbox.stateful.orders import (
    ExecOperation,
    GetOperation,
    Operation,
    PutOperation,
    SandboxOrder,
    digest_of,
)

MAX_STARTS = 4
# Sandboxes after their setup, of which others are copies.
MAX_TEMPLATES = 8


class SandboxMissing(HeddleError):
    """This worker does not have the sandbox as the order expects it: it is to be sent with its past."""


@dataclass(slots=True)
class _Kept:
    """A sandbox, the operations it has had, and the latest answer with its key."""

    sandbox: StatefulSandbox
    done: int = 0
    broken: bool = False
    key: str = ""
    answer: dict[str, Any] = field(default_factory=dict)


class SandboxKeeper:
    """Keeps sandboxes by name.

    Parameters
    ----------
    make
        A sandbox that is not started, of that name and from that spec.
    max_starts
        Starts that go on at the same time; the others wait.

    Attributes
    ----------
    most_starts
        The most starts that have gone on at the same time.
    """

    def __init__(self, make: Callable[[str, SandboxSpec], StatefulSandbox], *, max_starts: int = MAX_STARTS) -> None:
        self._make = make
        self._starts = asyncio.Semaphore(max_starts)
        self._kept: dict[str, _Kept] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._templates: OrderedDict[str, StatefulSandbox] = OrderedDict()
        self._template_locks: dict[str, asyncio.Lock] = {}
        self._running: dict[str, dict[asyncio.Task[Any], None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._starting = 0
        self.most_starts = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._kept)

    async def perform(
        self, order: SandboxOrder, *, cpus: int = 1, cores: Sequence[int] = (), key: str = ""
    ) -> dict[str, Any]:
        """Do what the order says.

        Parameters
        ----------
        key
            The same for every attempt of one operation: one that has been done is answered from memory.

        Returns
        -------
        dict
            ``"value"``: the form of an `ExecResult`, the content of a file, or None; ``"digest"`` and ``"cpus"``, for a
            `PastOperation`; ``"rebuilt"``: the number of operations that were run again before.

        Raises
        ------
        SandboxMissing, ReplayDiffers, SandboxFailed
        """
        task = asyncio.current_task()
        assert task is not None
        mine = self._running.setdefault(order.sandbox, {})
        mine[task] = None
        try:
            async with self._locks.setdefault(order.sandbox, asyncio.Lock()):
                return await self._perform(order, cpus, tuple(cores), key)
        finally:
            mine.pop(task, None)

    async def _perform(self, order: SandboxOrder, cpus: int, cores: tuple[int, ...], key: str) -> dict[str, Any]:
        kept = self._kept.get(order.sandbox)
        if kept is not None and key and kept.key == key and not kept.broken:
            return kept.answer
        rebuilt = 0
        if kept is None or kept.broken or kept.done != order.done:
            if order.past is None:
                raise SandboxMissing(f"sandbox {order.sandbox}: not here after {order.done} operations")
            await self._discard(order.sandbox)
            kept, rebuilt = await self._build(order, cores)
        try:
            value, digest = await self._do(kept, order.operation, cpus, cores)
        except SandboxGone as error:
            kept.broken = True
            raise SandboxMissing(str(error)) from error
        kept.answer = {"value": value, "digest": digest, "cpus": cpus, "rebuilt": rebuilt}
        kept.key = key
        return kept.answer

    async def _do(self, kept: _Kept, operation: Operation, cpus: int, cores: tuple[int, ...]) -> tuple[Any, str]:
        if isinstance(operation, GetOperation):
            return await kept.sandbox.get(operation.path, operation.most_bytes), ""
        if isinstance(operation, PutOperation):
            await kept.sandbox.put(operation.path, operation.content)
            kept.done += 1
            return None, "put"
        if not isinstance(operation, ExecOperation):
            return None, ""
        kept.broken = True
        command = Command(operation.text, operation.timeout_s, cpus, cores, operation.service)
        result = await kept.sandbox.exec(command)
        kept.broken = False
        kept.done += 1
        return asdict(result), digest_of(result, operation.compared)

    # -- making and rebuilding ---------------------------------------------------------------------

    async def _build(self, order: SandboxOrder, cores: tuple[int, ...]) -> tuple[_Kept, int]:
        """The sandbox after its past, and how many operations were run again for it."""
        past = order.past or ()
        parent = self._kept.get(order.parent)
        copied = parent is not None and parent.done == order.parent_done == order.done and not parent.broken
        sandbox: StatefulSandbox | None = None
        async with self._starts:
            self._starting += 1
            self.most_starts = max(self.most_starts, self._starting)
            try:
                if copied and parent is not None:
                    with contextlib.suppress(SandboxFailed):  # a kind without copies
                        sandbox = await parent.sandbox.fork(order.sandbox)
                if sandbox is None:
                    copied = False
                    sandbox = await self._started(order.sandbox, order.spec)
            finally:
                self._starting -= 1
        kept = self._kept[order.sandbox] = _Kept(sandbox, done=order.done if copied else 0)
        if copied:
            return kept, 0
        for number, done in enumerate(past, start=1):
            kept.broken = True  # until it has all of its past
            _, digest = await self._do(kept, done.operation, done.cpus, cores)
            if digest != done.digest:
                await self._discard(order.sandbox)
                raise ReplayDiffers(_difference(done.operation, number, len(past)))
        kept.broken = False
        return kept, len(past)

    async def _started(self, name: str, spec: SandboxSpec) -> StatefulSandbox:
        if not spec.setup:
            return await self._set_up(name, spec)
        template = _template_key(spec)
        async with self._template_locks.setdefault(template, asyncio.Lock()):
            ready = self._templates.get(template)
            if ready is None:
                ready = self._templates[template] = await self._set_up(f"template {template}", spec)
            self._templates.move_to_end(template)
            try:
                return await ready.fork(name)
            except SandboxFailed:  # a kind without copies
                return await self._set_up(name, spec)
            finally:
                await self._drop_templates()

    async def _set_up(self, name: str, spec: SandboxSpec) -> StatefulSandbox:
        sandbox = self._make(name, spec)
        try:
            await sandbox.start()
            for path, content in sorted(spec.files.items()):
                await sandbox.put(path, content)
            for text in spec.setup:
                result = await sandbox.exec(Command(text, spec.setup_timeout_s))
                if not result.ok:
                    raise SandboxFailed(f"sandbox: its setup {text[:80]!r} failed: {result.text[-300:]!r}")
        except BaseException:
            await asyncio.shield(sandbox.stop())
            raise
        return sandbox

    async def _drop_templates(self) -> None:
        while len(self._templates) > MAX_TEMPLATES:
            name = next(iter(self._templates))
            if self._template_locks[name].locked() and len(self._templates) > 1:
                self._templates.move_to_end(name)
                name = next(iter(self._templates))
            await self._templates.pop(name).stop()

    # -- closing -----------------------------------------------------------------------------------

    async def _discard(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            await kept.sandbox.stop()

    def close_soon(self, name: str) -> None:
        """Begin to end a sandbox with all that runs in it; a sandbox that is not here is ignored."""
        for task in list(self._running.get(name, ())):
            task.cancel()
        # From here on it is not found, whatever is asked for before it has ended.
        closing = asyncio.get_running_loop().create_task(self._close(name, self._kept.pop(name, None)))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, name: str, kept: _Kept | None) -> None:
        lock = self._locks.setdefault(name, asyncio.Lock())
        async with lock:
            if kept is not None:
                await kept.sandbox.stop()
        if not self._running.get(name):
            self._locks.pop(name, None)
        if not self._running.get(name):
            self._running.pop(name, None)

    async def close(self) -> None:
        for name in {*self._kept, *self._running}:
            self.close_soon(name)
        while self._closing:
            await asyncio.wait(set(self._closing))
        while self._templates:
            _, template = self._templates.popitem()
            await template.stop()


def _template_key(spec: SandboxSpec) -> str:
    return sha256(repr(sorted(spec.to_plain().items(), key=lambda each: each[0])).encode()).hexdigest()[:24]


def _difference(operation: ExecOperation | PutOperation, number: int, count: int) -> str:
    what = operation.text if isinstance(operation, ExecOperation) else f"the file {operation.path}"
    return (
        f"sandbox: it was rebuilt on another worker, and its operation {number} of {count}, {what[:120]!r}, had "
        "another output than the first time"
    )
