"""Operations in sandboxes as actions of a tool worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed import get_worker

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.isolation.granted import granted
from heddle_dask.live.wire.transport import send
from heddle_dask.live.wire.worker_messages import SilenceReport
from heddle_dask.live.worker.gateway_host import SOCKET_NAME, GatewayHost
from heddle_dask.sandbox.images.cache import images_directory, sweep
from heddle_dask.sandbox.program_files import reap_folders
from heddle_dask.sandbox.stateful.contract import WORKERS_GATEWAY, SandboxFailed, SandboxSpec, StatefulSandbox
from heddle_dask.sandbox.stateful.local_sandbox import close_keeper_of_loop, keeper_of_loop, sandboxes_directory
from heddle_dask.sandbox.stateful.orders import SandboxOrder
from heddle_dask.sandbox.stateful.work_directory import reap

TOKEN_FILE_VARIABLE = "HEDDLE_SANDBOX_TOKEN_FILE"
"""In the environment of a tool worker: the file with the token for remote sandbox services."""


def _remote(name: str, spec: SandboxSpec) -> StatefulSandbox:
    # Of the workers, only those that use a service need the client of HTTP.
    from heddle_dask.sandbox_service.client import RemoteSandbox
    from heddle_dask.sandbox_service.contract import read_token

    path = os.environ.get(TOKEN_FILE_VARIABLE)
    if not path or not spec.root:
        raise SandboxFailed(
            f"sandbox: the kind remote needs root=ADDRESS, and {TOKEN_FILE_VARIABLE} in the worker's environment"
        )
    worker = get_worker()
    return RemoteSandbox(
        spec.root,
        read_token(Path(path), make=False),
        spec,
        lambda line: send(worker, SilenceReport(line)),
    )


async def gateway_socket() -> str:
    """Path of the Unix socket of the gateway beside this worker, which is started by this."""
    for plugin in get_worker().plugins.values():
        host = getattr(plugin, "gateway", None)
        if isinstance(host, GatewayHost):
            try:
                return str(Path((await host.place()).directory) / SOCKET_NAME)
            except BadInput as error:
                raise SandboxFailed(f"sandbox: {error}") from None
    raise SandboxFailed("sandbox: no gateway beside this worker")


async def perform_in_sandbox(order: SandboxOrder, cpus: int = 1, idempotency_key: str = "") -> dict[str, Any]:
    """Do what the order says, on the cores of the action; see `SandboxKeeper.perform`."""
    if order.spec.gateway == WORKERS_GATEWAY:
        order = replace(order, spec=replace(order.spec, gateway=await gateway_socket()))
    given = granted()
    cores = () if given is None else given.cores
    return await keeper_of_loop(_remote).perform(order, cpus=cpus, cores=cores, key=idempotency_key)


def close_sandbox(name: str) -> None:
    """Begin to end a sandbox of this worker."""
    keeper_of_loop().close_soon(name)


async def reap_stale_sandboxes() -> None:
    """Delete what workers that died have left on this machine."""
    with contextlib.suppress(HeddleError):  # said again to the first program that wants a sandbox
        await asyncio.to_thread(lambda: reap(sandboxes_directory()))
        await asyncio.to_thread(lambda: sweep(images_directory()))
    await asyncio.to_thread(reap_folders)


async def close_sandboxes() -> None:
    await close_keeper_of_loop()
