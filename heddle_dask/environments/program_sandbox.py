"""The sandbox of a trajectory as its agent program uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from heddle_dask.core.errors import BadInput
from heddle_dask.core.needs import Given, Needs
from heddle_dask.core.resources import MEMORY
from heddle_dask.environments.actions import ActionKind
from heddle_dask.sandbox.stateful.contract import WORKERS_GATEWAY, ExecResult, SandboxSpec
from heddle_dask.sandbox.stateful.orders import Compared


class ProgramSandbox(Protocol):
    """A sandbox that keeps its files between calls; ``async with ctx.sandbox(…) as box:``.

    Each call is an action. The first one chooses the worker, and the sandbox stays there. It holds memory, and no
    cores between its calls. Calls of one sandbox wait for one another. If its worker leaves, the sandbox is rebuilt on
    another by running its commands again; where one of them then has another output, the trajectory fails with the
    cause ``"sandbox"``.
    """

    async def exec(
        self,
        command: str,
        *,
        needs: Needs | None = None,
        cpus: Given | None = None,
        timeout_s: float | None = None,
        kind: ActionKind = "tool",
        label: str = "shell",
        service: str = "",
        compared: Compared = "output",
    ) -> ExecResult:
        """Run a command of the shell in the work directory; whatever it does comes back as a result.

        Parameters
        ----------
        command
            ``{cpus}`` stands for the number of granted CPUs, as in ``pytest -n {cpus}``.
        needs, cpus
            As in `Context.call`. Memory is that of the sandbox.
        timeout_s
            Seconds after which all its processes are killed; the result then has what it had written. None: the run's
            default (`Budget.tool_timeout_s`), from 600 s downwards.
        label
            Kind of command, by which durations are learned.
        service
            Name of a service that the command starts: it lives on, is frozen between calls, and goes on during them.
            The result comes at once.
        compared
            What must be equal when the command is run again to rebuild the sandbox: ``"output"``, where durations and
            times of day do not count, or ``"status"`` (the exit code) for a command whose output varies.

        Raises
        ------
        ActionFailed
            The sandbox could not be started, or its workers were lost too often.
        """

    async def put(self, path: str, content: bytes | str) -> None:
        """Write a file below the work directory, or anywhere in an image; folders on the way are made.

        Raises
        ------
        ActionFailed
            The file cannot be written.
        """

    async def get(self, path: str, *, most_bytes: int = 16 << 20) -> bytes:
        """Read a file below the work directory, or anywhere in an image.

        Raises
        ------
        ActionFailed
            There is no such file, or it is longer than `most_bytes`.
        """

    async def fork(self) -> ProgramSandbox:
        """A second sandbox with a copy of the files; services are not copied.

        It is a copy on the same worker where that has the memory and the kind can, and is rebuilt elsewhere otherwise.
        """

    def close(self) -> None:
        """End it; done by ``async with``, and by the end of the trajectory for those that are left open."""

    async def __aenter__(self) -> ProgramSandbox: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def sandbox_spec(
    root: str,
    image: str,
    kind: str,
    files: Mapping[str, bytes | str] | None,
    setup: Sequence[str],
    memory: int | str,
    disk: int | str,
    network: bool,
    gateway: object = None,
    **limits: Any,
) -> SandboxSpec:
    """The description of a sandbox that a program asks for (`Context.sandbox`)."""
    if isinstance(setup, str) or not all(isinstance(each, str) for each in setup):
        raise BadInput(f"sandbox: setup is {setup!r}: use a list of commands")
    spec = SandboxSpec(
        kind=kind,
        root=str(root),
        image=str(Path(image).absolute()) if image else "",
        setup=tuple(setup),
        memory_bytes=_size("memory", memory),
        disk_bytes=_size("disk", disk),
        network=bool(network),
        gateway="" if gateway is None else WORKERS_GATEWAY,
        **limits,
    )
    contents = {
        spec.checked_path(path): content.encode() if isinstance(content, str) else bytes(content)
        for path, content in (files or {}).items()
    }
    return replace(spec, files=contents)


def _size(name: str, given: int | str) -> int:
    try:
        amounts = Needs(memory=given).demand()[MEMORY]
    except BadInput:
        amounts = None
    if amounts is None or amounts.elastic or amounts.least < 1:
        raise BadInput(f"sandbox: {name} is {given!r}: use bytes or a text such as '2 GiB'")
    return amounts.least
