"""The keeper of a worker's sandboxes: one for each event loop, with a directory of this user for their files."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from heddle_dask.core.errors import HeddleError
from heddle_dask.sandbox.process_accounting import ProcessAccounting
from heddle_dask.sandbox.stateful.contract import SandboxSpec, StatefulSandbox
from heddle_dask.sandbox.stateful.keeper import MAX_STARTS, SandboxKeeper
from heddle_dask.sandbox.stateful.kinds import kind_named
from heddle_dask.sandbox.stateful.local_sandbox import LocalSandbox
from heddle_dask.sandbox.stateful.work_directory import reap

RemoteMaker = Callable[[str, SandboxSpec], StatefulSandbox]


def sandboxes_directory() -> Path:
    """The directory of this user's sandboxes on this machine, in the one for temporary files.

    As root, other users may pass through it, for each sandbox has a user id of its own; they cannot list it.

    Raises
    ------
    HeddleError
        Another user could have put something in its place.
    """
    path = Path(tempfile.gettempdir()) / f"heddle-sandboxes-{os.getuid()}"
    mode = 0o711 if os.geteuid() == 0 else 0o700
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise HeddleError(
            f"directory {path} cannot be used: another user may have made it: remove it, or set TMPDIR"
        )
    path.chmod(mode)
    return path


def local_keeper(
    base: Path | None = None, *, max_starts: int = MAX_STARTS, remote: RemoteMaker | None = None
) -> SandboxKeeper:
    """A keeper of sandboxes on this machine; what workers that died have left is deleted first.

    Parameters
    ----------
    remote
        Makes those of the kind ``remote``.
    """
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
