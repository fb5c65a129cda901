"""Runs Python code of an agent in a sandbox and always returns a result.

`PythonSandbox.detect()` tries the modes once, strongest first, by running a program in each. Functions that run as
actions on a Dask worker have no object to store it in, so `run_python` keeps one sandbox per event loop.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.sandbox.bubblewrap import Bubblewrap, Interpreter
from heddle_dask.sandbox.confinement import Confinement, Mode
from heddle_dask.sandbox.outcome import RawRun, SandboxLimits, ToolOutput, judge
from heddle_dask.sandbox.process import run_confined
from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.weak import Weak

__all__ = [
    "PythonSandbox",
    "SandboxLimits",
    "ToolOutput",
    "run_python",
    "sandbox_mode",
    "shared_sandbox",
]

_DEFAULT_LIMITS = SandboxLimits()
# Each run uses three descriptors, and 1024 is a common limit. Further runs wait; waiting does not count for their
# time limits.
_MOST_AT_ONCE = 256
# A mode is accepted only if the kernel limits the number of processes: a watchdog is too slow for a fork bomb. The
# probe leaves dead children unreaped, which the kernel counts and the watchdog does not; with living children, on a
# busy machine, the watchdog might stop the probe before the kernel refuses a fork.
_PROBE = """
import json, os, socket, subprocess
try:
    for _ in range(16):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
except BlockingIOError:
    print("walled", end="")
"""
_PROBE_LIMITS = SandboxLimits(wall_s=20.0, processes=8)

# Cached sandbox per event loop, since its objects belong to a loop.
_shared: dict[asyncio.AbstractEventLoop, asyncio.Task[PythonSandbox]] = {}


class PythonSandbox:
    """Runs programs in one confinement. Make it with `detect`, inside the event loop that uses it."""

    def __init__(self, confinement: Confinement) -> None:
        self.confinement = confinement
        self._accounting = ProcessAccounting()
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)

    @classmethod
    async def detect(cls, only: Mode | None = None) -> PythonSandbox:
        """Find the strongest working mode by running a program in each."""
        attempts = []
        for name, confinement in candidates():
            if only is not None and confinement.mode != only:
                continue
            sandbox = cls(confinement)
            try:
                output = await sandbox.run(_PROBE, limits=_PROBE_LIMITS)
            except OSError as error:
                attempts.append(f"{name}: {error}")
                continue
            if output.text.startswith("walled"):
                return sandbox
            last = output.text.strip().splitlines()[-2:]
            attempts.append(f"{name}: {' '.join(last) or 'processes are not bounded'}")
        tried = "; ".join(attempts) or "nothing to try"
        raise HeddleError(f"no sandbox works on {os.uname().nodename} ({tried}): install the package `bubblewrap`")

    @property
    def mode(self) -> Mode:
        return self.confinement.mode

    async def run(
        self,
        code: str,
        *,
        limits: SandboxLimits = _DEFAULT_LIMITS,
        cpus: int = 1,
        files: Mapping[str, str] | None = None,
    ) -> ToolOutput:
        raw = await self.run_raw(code, limits=limits, cpus=cpus, files=files)
        return judge(raw, limits)

    async def run_raw(
        self,
        code: str,
        *,
        limits: SandboxLimits,
        cpus: int = 1,
        files: Mapping[str, str] | None = None,
        calls: Mapping[str, Any] | None = None,
    ) -> RawRun:
        """Run code, or with `calls` one function of it many times (`inside.run_calls`)."""
        checked = {_relative(path): text for path, text in (files or {}).items()}
        async with self._places, self.confinement.prepare(limits, cpus) as prepared:
            order = {
                "limits": dict(prepared.rlimits),
                "uid": prepared.setuid,
                "calls_filter": prepared.calls_filter,
                "files": checked,
                "code": code,
                "calls": None if calls is None else dict(calls),
            }
            return await run_confined(prepared, order, limits, self._accounting)


def candidates() -> Iterator[tuple[str, Confinement]]:
    """Confinements to try on this machine, the strongest first."""
    root = os.geteuid() == 0
    bwrap, unshare, setpriv = (shutil.which(name) for name in ("bwrap", "unshare", "setpriv"))
    if bwrap is not None:
        if root:
            yield "bubblewrap as root", Bubblewrap(bwrap, private_user_ids=True)
        yield "bubblewrap", Bubblewrap(bwrap, private_user_ids=False)
    if root and setpriv is None:
        return  # without its own user id, code would run as root without any protection
    own = Interpreter.of_this_process()
    programs = [own.program] if own.open_to_all or not root else []
    for interpreter in dict.fromkeys([*programs, "/usr/bin/python3"]):
        if unshare is not None:
            strong = Weak(interpreter, as_root=root, unshare=unshare, setpriv=setpriv)
            yield f"weak, no network, {interpreter}", strong
        plain = Weak(interpreter, as_root=root, unshare=None, setpriv=setpriv)
        yield f"weak, {interpreter}", plain


async def shared_sandbox() -> PythonSandbox:
    """The sandbox of the running event loop, detected at the first call."""
    loop = asyncio.get_running_loop()
    for closed in [other for other in tuple(_shared) if other.is_closed()]:
        _shared.pop(closed, None)
    task = _shared.get(loop)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = _shared[loop] = loop.create_task(PythonSandbox.detect())
    # Shielded: a cancellation of the first caller must not fail the other waiting callers.
    return await asyncio.shield(task)


async def run_python(
    code: str,
    *,
    limits: SandboxLimits = _DEFAULT_LIMITS,
    cpus: int = 1,
    files: Mapping[str, str] | None = None,
) -> ToolOutput:
    """Run Python code in the sandbox. Every outcome of the code is returned as a `ToolOutput`.

    Cancelling the coroutine kills every process of the run and removes its directory. At most 256 runs are active at
    once in one event loop; others wait.

    Parameters
    ----------
    code
        Run as a script (``__name__ == "__main__"``) in a private directory; standard library only.
    cpus
        CPUs granted; in ``HEDDLE_CPUS`` and the variables of numeric libraries.
    files
        Texts to write into the private directory before the run, by relative path.

    Raises
    ------
    BadInput
        A path of `files` is absolute or leaves the directory.
    HeddleError
        No sandbox works on this machine.
    """
    sandbox = await shared_sandbox()
    return await sandbox.run(code, limits=limits, cpus=cpus, files=files)


def sandbox_mode() -> Mode:
    """The working mode of this machine. For use outside an event loop: it runs its own."""

    async def detect() -> Mode:
        return (await PythonSandbox.detect()).mode

    return asyncio.run(detect())


def _relative(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise BadInput(f"sandbox file {path!r}: give a relative path below the private directory")
    return str(pure)
