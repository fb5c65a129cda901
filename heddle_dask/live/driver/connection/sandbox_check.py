"""Which sandbox the tool workers have, and whether a rollout accepts it. The mode is found where tools run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Client

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.environments.base import Environment
from heddle_dask.live.driver.connection.capacity import WaitClock
from heddle_dask.live.wire import _dask_internals as dask
from heddle_dask.live.wire.driver_messages import GetCapacity
from heddle_dask.live.wire.messages import SCHEDULER_EVENT, TOOL_RESOURCE
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.sandbox.python_runner import shared_sandbox

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class WorkerSandbox:
    """The sandbox of one tool worker; `error` if none works there."""

    mode: str
    isolates_network: bool = False
    as_root: bool = False
    error: str = ""

    @property
    def text(self) -> str:
        """The mode in the words of `docs/sandbox.md`."""
        text = self.mode
        if self.mode == "weak":
            text += ", as root" if self.as_root else ", as a user"
        return text if self.isolates_network else f"{text}, network not isolated"

    @property
    def strong(self) -> bool:
        """True if code inside can neither change the files of the invoking user nor reach the network."""
        return self.isolates_network and (self.mode == "bubblewrap" or self.as_root)


async def worker_sandbox(dask_worker: Any) -> WorkerSandbox | None:
    """Runs on a worker: its sandbox, or None if it runs no tools."""
    if dask_worker.state.total_resources.get(TOOL_RESOURCE, 0) < 1:
        return None
    try:
        sandbox = await shared_sandbox()
    except HeddleError as error:
        return WorkerSandbox("none", error=str(error))
    return WorkerSandbox(sandbox.mode, sandbox.confinement.isolates_network, os.geteuid() == 0)


async def check_sandbox(
    client: Client,
    environments: Sequence[Environment],
    policy: str,
    patience_s: float,
    on_progress: Callable[[str], None],
) -> dict[str, str]:
    """Ask the tool workers that have joined for their sandbox, if an environment says that it `uses_sandbox`.

    Parameters
    ----------
    policy
        ``"strong"`` or ``"weak"``.
    patience_s
        How long to wait for the first tool worker.
    on_progress
        Takes one line with the modes.

    Returns
    -------
    dict
        Metadata of the run: the modes under ``sandbox``; empty if there is nothing to say.

    Raises
    ------
    BadInput
        No sandbox works on a tool worker, or it is weaker than `policy` allows.
    """
    if not any(getattr(environment, "uses_sandbox", False) for environment in environments):
        return {}
    found = await _tool_sandboxes(client, patience_s)
    for address, sandbox in found.items():
        if sandbox.error:
            raise BadInput(f"tool worker {address}: {sandbox.error}")
        if policy != "weak" and not sandbox.strong:
            raise BadInput(
                f"tool worker {address} has only the sandbox '{sandbox.text}' (docs/sandbox.md): install the package "
                "`bubblewrap` there, or accept it with --sandbox weak, in Python Budget(sandbox='weak')"
            )
    if not found:
        return {}
    modes = "; ".join(sorted({sandbox.text for sandbox in found.values()}))
    on_progress(f"sandbox: {modes}")
    return {"sandbox": modes}


async def _tool_sandboxes(client: Client, patience_s: float) -> dict[str, WorkerSandbox]:
    """By worker address. Empty if no tool worker joins in time; the wait for capacity says so then."""
    clock = WaitClock()
    while True:
        answers = await client.run(worker_sandbox, on_error="ignore")
        found = {at: answer for at, answer in answers.items() if isinstance(answer, WorkerSandbox)}
        if found or clock.waited_s(await _tool_jobs_coming(client)) > patience_s:
            return found
        await asyncio.sleep(_POLL_S)


async def _tool_jobs_coming(client: Client) -> bool:
    try:
        # The plugin is registered later, where no cluster of this project has done it.
        if client.scheduler is None or not await dask.event_is_set(client, SCHEDULER_EVENT):
            return False
        queued = (await ask_scheduler(client, GetCapacity())).queued
    except (OSError, RuntimeError):
        return False
    return queued.tool_workers + queued.starting_tool_workers > 0
