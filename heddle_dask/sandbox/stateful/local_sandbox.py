"""Stateful sandboxes on this machine, of any of the kinds of `kinds`, and the keeper of a worker's sandboxes.

There is one keeper for each event loop, with a directory of this user for the files of its sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import HeddleError
from heddle_dask.isolation.granted import granted
from heddle_dask.sandbox.confinement import DiskUsage
from heddle_dask.sandbox.process_accounting import Allowed, Limit, Pace, ProcessAccounting, until_over
from heddle_dask.sandbox.program_files import directory_of_user
from heddle_dask.sandbox.stateful.contract import (
    MIB,
    WORK,
    Command,
    ExecResult,
    SandboxFailed,
    SandboxSpec,
    StatefulSandbox,
)
from heddle_dask.sandbox.stateful.image_directory import ImageDirectory
from heddle_dask.sandbox.stateful.image_kind import ImageKind
from heddle_dask.sandbox.stateful.keeper import MAX_STARTS, SandboxKeeper
from heddle_dask.sandbox.stateful.kinds import SandboxKind, kind_named
from heddle_dask.sandbox.stateful.supervised_command import SupervisedCommand
from heddle_dask.sandbox.stateful.work_directory import WorkDirectory, reap

_PROBE_S = 20.0
# A command can write for a moment before the watch ends it. Where many have, the sandbox is over.
_MOST_OVER = 8


class LocalSandbox:
    """See `contract.StatefulSandbox`.

    Parameters
    ----------
    name
        Unlike that of every other sandbox; the user id inside follows from it.
    accounting
        Shared by the sandboxes of one event loop.
    """

    def __init__(
        self, name: str, spec: SandboxSpec, kind: SandboxKind, base: Path, accounting: ProcessAccounting
    ) -> None:
        self._name = name
        self._spec = spec
        self._kind = ImageKind(kind) if spec.image and not isinstance(kind, ImageKind) else kind
        self._base = base
        self._accounting = accounting
        self._files = (
            ImageDirectory(base, name, spec, private_user=kind.private_user)
            if spec.image
            else WorkDirectory(base, name, private_user=kind.private_user)
        )
        self._services: dict[str, SupervisedCommand] = {}
        self._held: dict[SupervisedCommand, None] = {}  # all that lives in it: the command and the services
        self._pace = Pace()
        self._stopped = False
        self._used: asyncio.Future[DiskUsage] | None = None

    async def start(self) -> None:
        """See the contract; a first command shows whether the kind works here."""
        if isinstance(self._files, ImageDirectory):
            await self._files.unpack()
        try:
            await _to_its_end(self._files.make)
        except OSError as error:
            raise SandboxFailed(f"sandbox: no directory in {self._base}: {error.strerror}") from error
        probe = await self.exec(Command("test -d . && echo ready", timeout_s=_PROBE_S))
        if probe.stdout != "ready\n":
            raise SandboxFailed(f"sandbox {self._kind.name} does not work here: {probe.text[:300]!r}")

    async def exec(self, command: Command) -> ExecResult:
        """See the contract. A limit that all in the sandbox exceed together ends all: the command and the services."""
        if self._stopped:
            raise SandboxFailed("sandbox: it was stopped")
        allowed = Allowed(self._spec.max_processes, self._spec.memory_bytes, await self._allowed())
        self._pace.begin()
        watch = asyncio.ensure_future(
            until_over(
                lambda: self._accounting.tree_usage(*(each.pid for each in self._held)),
                lambda: sum(each.own_threads for each in self._held),
                allowed,
                self._files.usage,
                self._pace,
            )
        )
        watch.add_done_callback(self._stop_for)
        try:
            given = granted()
            # Lent cores are for the command, which goes after those that have them; a service does not.
            cores = command.cores if given is None else given.own_cores or command.cores
            await self._tell_services(lambda service: service.thaw(cores))
            return await self._run(command)
        finally:
            watch.cancel()
            await asyncio.shield(self._tell_services(SupervisedCommand.freeze))
            self._measure()

    def _stop_for(self, watch: asyncio.Future[Limit]) -> None:
        if not watch.cancelled() and watch.exception() is None:
            for each in self._held:
                each.stop_for(watch.result())

    async def _tell_services(self, tell: Callable[[SupervisedCommand], Awaitable[bool]]) -> None:
        """Freeze or thaw the services; those that have ended, or do not obey, or are to stop, are ended."""
        services = list(self._services.items())
        obeyed = await asyncio.gather(*(tell(service) for _, service in services))
        for (name, service), fine in zip(services, obeyed, strict=True):
            if not fine or service.to_stop:
                del self._services[name]
                self._held.pop(service, None)
                await service.end()

    async def _run(self, command: Command) -> ExecResult:
        with self._kind.prepare(command, self._files, self._spec) as prepared:
            started = await SupervisedCommand.start(prepared, self._spec, command.cores, service=bool(command.service))
        self._held[started] = None
        if command.service:
            before = self._services.pop(command.service, None)
            self._services[command.service] = started
            if before is not None:
                self._held.pop(before, None)
                await before.end()
            return ExecResult(0)
        try:
            return self._without_places(await started.until_end(command.timeout_s))
        finally:
            self._held.pop(started, None)

    def _measure(self) -> None:
        """Begin to measure the files: nothing writes to them until the next operation, which waits for the result."""
        self._used = asyncio.ensure_future(asyncio.to_thread(self._files.usage))
        self._used.add_done_callback(lambda used: used.cancelled() or used.exception())  # it may be asked for no more

    async def _allowed(self) -> DiskUsage:
        """What the files may take: where they take too much, no more, so that a command can delete some.

        Raises
        ------
        SandboxFailed
            They take so much that command after command must have written more.
        """
        limit, used = DiskUsage(self._spec.disk_bytes, self._spec.max_files), await self._used_now()
        if used.used_bytes > _MOST_OVER * limit.used_bytes or used.files > _MOST_OVER * limit.files:
            raise SandboxFailed(f"sandbox: its files take {_MOST_OVER} times what they may: make it again")
        return DiskUsage(max(limit.used_bytes, used.used_bytes), max(limit.files, used.files))

    async def _used_now(self) -> DiskUsage:
        if self._used is None:
            self._measure()
        assert self._used is not None
        return await asyncio.shield(self._used)

    def _without_places(self, result: ExecResult) -> ExecResult:
        """The outputs without what differs between two sandboxes with the same files: path and user id."""
        names = {str(self._files.work): WORK, str(self._files.tmp): "/tmp", str(self._files.path): "/sandbox"}
        if self._files.uid is not None:
            names[str(self._files.uid)] = "1000"
        out, err = result.stdout, result.stderr
        for own, common in names.items():
            out, err = out.replace(own, common), err.replace(own, common)
        return replace(result, stdout=out, stderr=err)

    async def put(self, path: str, content: bytes) -> None:
        used = await self._used_now()
        if used.used_bytes + len(content) > self._spec.disk_bytes:
            raise SandboxFailed(f"sandbox file {path!r}: over the limit of {self._spec.disk_bytes:,} bytes in all")
        try:
            await asyncio.to_thread(self._files.put, path, content)
        finally:
            self._measure()

    async def get(self, path: str, most_bytes: int = 16 * MIB) -> bytes:
        return await asyncio.to_thread(self._files.get, path, most_bytes)

    async def fork(self, name: str) -> LocalSandbox:
        copy = LocalSandbox(name, self._spec, self._kind, self._base, self._accounting)
        try:
            await _to_its_end(copy._files.copy_of, self._files)
        except OSError as error:
            await copy.stop()
            raise SandboxFailed(f"sandbox: its files were not copied: {error.strerror}") from error
        except BaseException:
            await copy.stop()
            raise
        return copy

    async def stop(self) -> None:
        self._stopped = True
        services, self._services = self._services, {}
        for service in services.values():
            with contextlib.suppress(TimeoutError):
                await service.end()
        # In a thread without an await in between, so that a second cancellation cannot prevent it.
        await asyncio.to_thread(self._files.delete)


async def _to_its_end(function: Callable[..., None], *given: Any) -> None:
    """Run a function in a thread; a cancellation waits for its end: what it has made can then be deleted."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *given))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


RemoteMaker = Callable[[str, SandboxSpec], StatefulSandbox]


def sandboxes_directory() -> Path:
    """The directory of this user's sandboxes on this machine."""
    return directory_of_user("heddle-sandboxes")


def local_keeper(
    base: Path | None = None, *, max_starts: int = MAX_STARTS, remote: RemoteMaker | None = None
) -> SandboxKeeper:
    """A keeper of sandboxes on this machine; what workers that died have left is deleted first."""
    directory = sandboxes_directory() if base is None else base
    reap(directory)
    accounting = ProcessAccounting()

    def make(name: str, spec: SandboxSpec) -> StatefulSandbox:
        if spec.kind == "remote":
            if remote is None:
                raise HeddleError("sandbox: no remote service is known here")
            return remote(name, spec)
        return LocalSandbox(name, spec, kind_named(spec.kind), directory, accounting)

    return SandboxKeeper(make, max_starts=max_starts)


_keepers: dict[asyncio.AbstractEventLoop, SandboxKeeper] = {}


def keeper_of_loop(remote: RemoteMaker | None = None) -> SandboxKeeper:
    """The keeper of the running event loop, made at the first call."""
    loop = asyncio.get_running_loop()
    for closed in [other for other in _keepers if other.is_closed()]:
        del _keepers[closed]
    if loop not in _keepers:
        _keepers[loop] = local_keeper(remote=remote)
    return _keepers[loop]


async def close_keeper_of_loop() -> None:
    """End all sandboxes of the running event loop."""
    keeper = _keepers.pop(asyncio.get_running_loop(), None)
    if keeper is not None:
        await keeper.close()
