"""The weak mode, for machines without bubblewrap; `docs/sandbox.md` has its limitations.

Resource limits, an own session and private directory, an empty environment, and no network if `unshare` may make a
network namespace. As root every run has its own user id, by which its processes are counted, limited and killed.
Without root that is impossible: the program may then start no process and no thread at all, so none can remain.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from heddle_dask.sandbox import inside
from heddle_dask.sandbox.confinement import (
    Mode,
    PreparedRun,
    common_environment,
    private_user_id,
    rlimits_of,
)
from heddle_dask.sandbox.outcome import SandboxLimits
from heddle_dask.sandbox.program_files import disk_usage, new_folder, remove
from heddle_dask.sandbox.system_calls import filter_program


class Weak:
    """Runs behind resource limits and, as root, user ids.

    Parameters
    ----------
    interpreter
        Path of the Python to run; as root it must be executable by every user.
    as_root
        True: each run gets its own user id (needs `setpriv`).
    unshare
        Path of ``unshare`` to disconnect the network; None to leave it connected.
    setpriv
        Path of ``setpriv``, with which the program dies together with this process; None: it may outlive it.
    """

    mode: Mode = "weak"

    def __init__(self, interpreter: str, *, as_root: bool, unshare: str | None, setpriv: str | None) -> None:
        self.isolates_network = unshare is not None
        self._command = (interpreter, "-I", "-S", "-B", "-c", inside.source())
        self._private_user_ids = as_root
        self._unshare: tuple[str, ...] = ()
        if unshare is not None:
            new_user = () if as_root else ("--user", "--map-current-user")
            self._unshare = (unshare, *new_user, "--net", "--ipc")
        self._setpriv = setpriv

    @asynccontextmanager
    async def prepare(self, limits: SandboxLimits, cpus: int) -> AsyncIterator[PreparedRun]:
        uid = private_user_id() if self._private_user_ids else None
        folder = new_folder()
        try:
            if uid is not None:
                os.chown(folder, uid, uid)
            yield PreparedRun(
                argv=(*self._unshare, *self._privileges(uid), *self._command),
                environment=common_environment(folder, cpus),
                folder=folder,
                rlimits=rlimits_of(limits) if uid is not None else {**rlimits_of(limits), "RLIMIT_NPROC": 1},
                owned_uid=uid,
                calls_filter=filter_program(),
                disk_usage=lambda pids: disk_usage(folder, pids),
            )
        finally:
            # Passed to a thread without an await in between, so that a second cancellation cannot prevent it.
            await asyncio.to_thread(remove, folder)

    def _privileges(self, uid: int | None) -> tuple[str, ...]:
        if self._setpriv is None:
            return ()
        # The change of user id clears the death signal, so it must be set afterwards, as setpriv does.
        change = ("--reuid", str(uid), "--regid", str(uid), "--clear-groups") if uid else ()
        return (self._setpriv, *change, "--no-new-privs", "--pdeathsig", "KILL")
