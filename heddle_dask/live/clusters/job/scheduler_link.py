"""The connection of a job to the scheduler: whether it is reached at all, and the request to drain its workers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil
from distributed.comm import get_address_host
from distributed.comm.core import connect
from distributed.security import Security
from distributed.utils import get_ip_interface

from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.job.options import JobOptions
from heddle_dask.live.wire.cluster_messages import DrainedWorkers, DrainWorkers
from heddle_dask.live.wire.transport import ask_scheduler_at

_RETRY_S = 1.0


class SchedulerLink:
    """What a job needs of its scheduler.

    Raises
    ------
    BadInput
        The TLS files cannot be used.
    """

    def __init__(self, options: JobOptions) -> None:
        self._options = options
        tls = options.tls
        security = (
            Security()
            if tls is None
            else Security(
                require_encryption=True,
                tls_ca_file=str(tls.ca),
                tls_worker_cert=str(tls.certificate),
                tls_worker_key=str(tls.key),
            )
        )
        try:
            self._connection_args: dict[str, Any] = security.get_connection_args("worker")
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise BadInput(f"the TLS files of job {options.name} cannot be used: {error}") from None

    async def worker_host(self) -> str:
        """Reach the scheduler; returns the address at which the workers of this job are to listen.

        Raises
        ------
        BadInput
            It is not reached, or the job's network interface does not exist.
        """
        options = self._options
        wanted = options.host
        if options.interface is not None:
            wanted = _address_of(options.interface)
        deadline_s = time.monotonic() + options.connect_s
        while True:
            left_s = max(1.0, deadline_s - time.monotonic())
            try:
                comm = await connect(options.address, timeout=left_s, **self._connection_args)
                break
            except (OSError, ValueError) as error:
                if time.monotonic() + _RETRY_S >= deadline_s or isinstance(error, ValueError):
                    raise BadInput(self._unreachable(error)) from error
            await asyncio.sleep(_RETRY_S)
        own = get_address_host(comm.local_address)
        comm.abort()
        return wanted or own

    def _unreachable(self, error: Exception) -> str:
        options = self._options
        through = f"interface {options.interface}" if options.interface else "the default route"
        said = str(error.__cause__ or error).splitlines()
        encrypted = "with TLS" if options.tls else "without TLS"
        return (
            f"job {options.name} does not reach the scheduler at {options.address} through {through} {encrypted} "
            f"within {options.connect_s:g} s ({said[0] if said else type(error).__name__}): check that the rollout "
            "still runs, and that this node reaches that address and port; else name another interface or port "
            "range in the cluster file"
        )

    async def drain(self, names: tuple[str, ...], ends_in_s: float) -> DrainedWorkers:
        """Have these workers drained; returns when they have left, or when their time is over.

        Raises
        ------
        OSError
            The scheduler does not answer.
        RuntimeError
            It has no such handler: it runs without the plugin.
        """
        request = DrainWorkers(names=names, ends_in_s=ends_in_s)
        return await ask_scheduler_at(self._options.address, self._connection_args, request)


def _address_of(interface: str) -> str:
    try:
        address: str = get_ip_interface(interface)
        return address
    except (ValueError, KeyError, OSError):
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise BadInput(
            f"--interface {interface} does not exist on this node or has no IPv4 address: choose one of {known}"
        ) from None
