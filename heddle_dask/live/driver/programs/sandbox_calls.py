"""A sandbox of a trajectory: its operations as actions, and its past, from which it is rebuilt on another worker."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.needs import Given, Needs
from heddle_dask.environments.actions import ActionKind, FunctionCall
from heddle_dask.live.driver.programs.action_calls import ActionCalls, SandboxUse
from heddle_dask.live.driver.programs.branch import BranchPort
from heddle_dask.live.worker.sandbox_host import perform_in_sandbox
from heddle_dask.sandbox.stateful.contract import ExecResult, SandboxSpec
from heddle_dask.sandbox.stateful.orders import (
    Compared,
    ExecOperation,
    GetOperation,
    Operation,
    PastOperation,
    PutOperation,
    SandboxOrder,
    StartOperation,
)

_LONGEST_S = 600.0
# Long files take a moment on a busy worker; no operation but a command may take longer.
_FILE_LABEL = "sandbox file"


class LiveSandbox:
    """Implements `heddle_dask.environments.program_sandbox.ProgramSandbox`."""

    def __init__(
        self,
        port: BranchPort,
        calls: ActionCalls,
        number: Callable[[], int],  # counts the sandboxes of one branch of the trajectory
        after_step: Callable[[], int],  # index of the last step of the branch
        spec: SandboxSpec,
        parent: str = "",
        past: tuple[PastOperation, ...] = (),  # of a copy: the operations of the sandbox of which it is one
    ) -> None:
        self._port = port
        self._calls = calls
        self._number = number
        self._after_step = after_step
        self._spec = spec
        self._parent = parent
        self._past = past
        self._parent_done = len(past)
        self._name = f"{port.services.session}/{port.spec.trajectory_id}/s{number()}"
        self._one_at_a_time = asyncio.Lock()
        self._used = False
        self._closed = False

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
        if not isinstance(command, str) or "\0" in command:
            raise BadInput(f"sandbox: the command is {command!r}: use a text")
        if compared not in ("output", "status"):
            raise BadInput(f"sandbox: compared is {compared!r}: use output or status")
        limit_s = self._port.services.budget.tool_timeout_s if timeout_s is None else timeout_s
        if limit_s is None:
            limit_s = _LONGEST_S
        if not (is_finite(limit_s) and limit_s > 0):
            raise BadInput(f"sandbox: timeout_s is {timeout_s!r}: use seconds above 0, or None")
        operation = ExecOperation(command, limit_s, service, compared)
        plain = await self._perform(operation, kind=kind, label=label, needs=needs, cpus=cpus)
        return ExecResult(**plain)

    async def put(self, path: str, content: bytes | str) -> None:
        data = content.encode() if isinstance(content, str) else bytes(content)
        await self._perform(PutOperation(self._spec.checked_path(path), data), label=_FILE_LABEL)

    async def get(self, path: str, *, most_bytes: int = 16 << 20) -> bytes:
        content: bytes = await self._perform(GetOperation(self._spec.checked_path(path), most_bytes), label=_FILE_LABEL)
        return content

    async def fork(self) -> LiveSandbox:
        async with self._one_at_a_time:
            copy = LiveSandbox(
                *(self._port, self._calls, self._number, self._after_step, self._spec),
                parent=self._name if self._used else "",
                past=self._past,
            )
            await copy._perform(StartOperation(), label="sandbox copy")
        return copy

    async def _perform(
        self,
        operation: Operation,
        *,
        label: str,
        kind: ActionKind = "tool",
        needs: Needs | None = None,
        cpus: Given | None = None,
    ) -> Any:
        self._spec = await self._port.services.roots.identified(self._spec)
        async with self._one_at_a_time:
            if self._closed:
                raise RuntimeError("sandbox: it was closed")
            order = self._order(operation, with_past=not self._past and not self._used)
            if operation.__class__ is StartOperation and self._parent:
                order = self._order(operation, with_past=True)
            self._used = True
            use = SandboxUse(
                self._name,
                self._spec.memory_bytes,
                self._parent,
                lambda: (perform_in_sandbox, (self._order(operation, with_past=True),), {}),
            )
            # The limit is that of the command: rebuilding may come first.
            call = FunctionCall(perform_in_sandbox, (order,), {}, cpus, needs, kind, label, timeout_s=math.inf)
            answer = await self._calls.run(call, self._after_step(), use)
            if isinstance(operation, ExecOperation | PutOperation):
                past = PastOperation(operation, answer["cpus"], answer["digest"])
                self._past = (*self._past, past)
            return answer["value"]

    def _order(self, operation: Operation, *, with_past: bool) -> SandboxOrder:
        return SandboxOrder(
            self._name,
            self._spec,
            operation,
            done=len(self._past),
            past=self._past if with_past else None,
            parent=self._parent,
            parent_done=self._parent_done,
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._used:
                self._port.services.submitter.close_sandbox(self._name)

    async def __aenter__(self) -> LiveSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
