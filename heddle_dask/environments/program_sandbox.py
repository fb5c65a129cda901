"""The sandbox of a trajectory as its agent program uses it."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Protocol

from heddle_dask.core.needs import Given, Needs
from heddle_dask.sandbox.stateful.contract import ExecResult
from heddle_dask.sandbox.stateful.orders import Compared

ActionKind = Literal["tool", "reward"]


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
        BadInput
            A parameter that is not allowed.
        """

    async def put(self, path: str, content: bytes | str) -> None:
        """Write a file below the work directory; folders on the way are made.

        Raises
        ------
        ActionFailed
            The file cannot be written.
        """

    async def get(self, path: str, *, most_bytes: int = 16 << 20) -> bytes:
        """Read a file below the work directory.

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
