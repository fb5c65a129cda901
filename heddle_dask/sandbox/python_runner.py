"""Runs Python code of an agent in a sandbox and comes back with an answer, whatever the code does.

`PythonSandbox.detect()` tries the modes once, strongest first, by running a program in each. Functions
that run as actions on a Dask worker have no object to keep it on, so `run_python` keeps one per event loop.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.sandbox.bubblewrap import Bubblewrap
from heddle_dask.sandbox.confinement import Confinement, Mode
from heddle_dask.sandbox.interpreter import Interpreter
from heddle_dask.sandbox.limits import SandboxLimits
from heddle_dask.sandbox.outcome import RawRun, ToolOutput, judge
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
# Each run holds three descriptors, and 1024 is a usual limit. Further runs wait; their time limits do not.
_MOST_AT_ONCE = 256
# A mode counts only if the kernel itself bounds processes in it: a watchdog is too late for a fork bomb. The kernel
# counts the dead that nobody has reaped, the watchdog does not: living ones it would stop on a busy machine, before
# the kernel has refused one.
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

# A memo of a fact about this machine, one per event loop because what it holds belongs to a loop.
_shared: dict[asyncio.AbstractEventLoop, asyncio.Task[PythonSandbox]] = {}


class PythonSandbox:
    """Runs programs in one confinement. Make it with `detect`, inside the event loop that uses it."""

    def __init__(self, confinement: Confinement) -> None:
        self.confinement = confinement
        self._accounting = ProcessAccounting()
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)

    @classmethod
    async def detect(cls, only: Mode | None = None) -> PythonSandbox:
        """Find the strongest mode that works here, by running a program in each.

        Parameters
        ----------
        only
            Try this mode alone.

        Raises
        ------
        HeddleError
            No mode works; names what each attempt said and what to install.
        """
        stories = []
        for name, confinement in candidates():
            if only is not None and confinement.mode != only:
                continue
            sandbox = cls(confinement)
            try:
                output = await sandbox.run(_PROBE, limits=_PROBE_LIMITS)
            except OSError as error:
                stories.append(f"{name}: {error}")
                continue
            if output.text.startswith("walled"):
                return sandbox
            last = output.text.strip().splitlines()[-2:]
            stories.append(f"{name}: {' '.join(last) or 'processes are not bounded'}")
        tried = "; ".join(stories) or "nothing to try"
        raise HeddleError(
            f"no sandbox works on {os.uname().nodename} ({tried}): install the package `bubblewrap`"
        )

    @property
    def mode(self) -> Mode:
        """Name of the mode in `docs/sandbox.md`."""
        return self.confinement.mode

    async def run(
        self,
        code: str,
        *,
        limits: SandboxLimits = _DEFAULT_LIMITS,
        cpus: int = 1,
        files: Mapping[str, str] | None = None,
    ) -> ToolOutput:
        """Run code as a script. See `run_python`."""
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
                "files": checked,
                "code": code,
                "calls": None if calls is None else dict(calls),
            }
            return await run_confined(prepared, order, limits, self._accounting)


def candidates() -> Iterator[tuple[str, Confinement]]:
    """Confinements worth a try on this machine, the strongest first."""
    root = os.geteuid() == 0
    bwrap, unshare, setpriv = (shutil.which(name) for name in ("bwrap", "unshare", "setpriv"))
    if bwrap is not None:
        if root:
            yield "bubblewrap as root", Bubblewrap(bwrap, private_user_ids=True)
        yield "bubblewrap", Bubblewrap(bwrap, private_user_ids=False)
    if root and setpriv is None:
        return  # without a user id of its own, code would run as root behind no wall at all
    own = Interpreter.of_this_process()
    programs = [own.program] if own.open_to_all or not root else []
    for interpreter in dict.fromkeys([*programs, "/usr/bin/python3"]):
        if unshare is not None:
            strong = Weak(interpreter, as_root=root, unshare=unshare, setpriv=setpriv)
            yield f"weak, no network, {interpreter}", strong
        plain = Weak(interpreter, as_root=root, unshare=None, setpriv=setpriv)
        yield f"weak, {interpreter}", plain


async def shared_sandbox() -> PythonSandbox:
    """The sandbox of the running event loop, detected at the first call.

    Raises
    ------
    HeddleError
        No mode works on this machine.
    """
    loop = asyncio.get_running_loop()
    for closed in [other for other in tuple(_shared) if other.is_closed()]:
        _shared.pop(closed, None)
    task = _shared.get(loop)
    if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
        task = _shared[loop] = loop.create_task(PythonSandbox.detect())
    # Shielded: the first caller's cancellation must not fail the others that wait for it.
    return await asyncio.shield(task)


async def run_python(
    code: str,
    *,
    limits: SandboxLimits = _DEFAULT_LIMITS,
    cpus: int = 1,
    files: Mapping[str, str] | None = None,
) -> ToolOutput:
    """Run Python code in the sandbox. Whatever the code does comes back as a `ToolOutput`.

    Cancelling the coroutine kills every process of the run and removes its directory. At most 256 runs
    go on at once in one event loop; more wait their turn.

    Parameters
    ----------
    code
        Run as a script (``__name__ == "__main__"``) in a private directory; standard library only.
    limits
        What it may use.
    cpus
        CPUs granted; sets ``OMP_NUM_THREADS``.
    files
        Texts to put into the private directory first, by relative path.

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
    """Mode that works on this machine. For use outside an event loop: it runs one to find out."""

    async def detect() -> Mode:
        return (await PythonSandbox.detect()).mode

    return asyncio.run(detect())


def _relative(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise BadInput(f"sandbox file {path!r}: give a relative path below the private directory")
    return str(pure)
