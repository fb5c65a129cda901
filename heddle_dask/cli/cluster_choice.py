"""Where a rollout runs: a new cluster on this machine, or an existing Dask scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from distributed import Client
from distributed.comm import parse_address, parse_host_port
from distributed.security import Security

from heddle_dask.cli.one_line import one_line
from heddle_dask.cli.rollout.run_logs import log_tail
from heddle_dask.core.errors import BadInput
from heddle_dask.core.toml_table import read_toml, unknown_key
from heddle_dask.engines.spec import check_hardware
from heddle_dask.live.clusters.local import ClusterProcessFailed, LocalRolloutCluster, SupervisedCluster
from heddle_dask.live.clusters.owned_directory import OwnedDirectory
from heddle_dask.live.clusters.quota_table import QUOTAS
from heddle_dask.live.clusters.slurm.cluster_file import AFFINITY
from heddle_dask.live.driver.connection.encryption import unencrypted
from heddle_dask.strategies.affinity.hardware_map import affinity_override

CONNECT_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 60.0


def parsed_hardware(text: str | None) -> dict[str, int] | None:
    """Classes with their numbers of engines from ``H800=2,H20=3``."""
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and count.isdecimal() for name, _, count in pairs):
        raise BadInput(f"--hardware {text}: use classes with their numbers of engines, such as H800=2,H20=3")
    return checked_hardware({name: int(count) for name, _, count in pairs}, "--hardware")


def checked_hardware(value: object, where: str) -> dict[str, int]:
    if not isinstance(value, Mapping) or not value:
        raise BadInput(f"{where} is {value!r}: use a table such as {{H800 = 2, H20 = 3}}")
    for name, count in value.items():
        check_hardware(where, name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise BadInput(f"{where}: {name} is {count!r}: use a whole number of at least 1")
    return dict(value)


def affinity_of_file(path: Path | None) -> tuple[str, ...]:
    """The override of a strategy that ``affinity`` of a cluster file says; empty without one."""
    table = None if path is None else read_toml(path, "--cluster").get(AFFINITY)
    return () if table is None else (affinity_override(table),)


@dataclass(frozen=True, slots=True)
class LocalShape:
    """Size of a cluster on this machine; the fields are the keys of ``--cluster FILE.toml``."""

    engines: int
    slots: int | None
    tool_workers: int
    tool_cpus: int | None
    trainers: int = 0
    hardware: Mapping[str, int] | None = None
    engines_per_gpu: int | None = None

    @property
    def all_tool_cpus(self) -> int:
        """CPUs that actions may use, as `LocalRolloutCluster` shares them out."""
        cpus = self.tool_cpus or os.cpu_count() or 1
        return max(1, cpus // self.tool_workers) * self.tool_workers

    def overlaid(self, path: Path, given: frozenset[str]) -> LocalShape:
        """This shape with the values of a file, except those given on the command line."""
        names = {field.name.replace("_", "-"): field.name for field in fields(self)}
        values = {name: getattr(self, name) for name in names.values()}
        for key, value in read_toml(path, "--cluster").items():
            if key in (QUOTAS, AFFINITY):
                continue  # of the run, not of the shape
            if key not in names:
                raise unknown_key(key, [*names, QUOTAS, AFFINITY], f"--cluster {path}")
            if key == "hardware":
                value = checked_hardware(value, f"--cluster {path}: hardware")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(f"--cluster {path}: {key} is {value!r}: use a whole number of at least 1")
            if names[key] not in given:
                values[names[key]] = value
        if values["hardware"] is not None and "engines" not in given:
            values["engines"] = sum(values["hardware"].values())
        return LocalShape(**values)


@contextlib.asynccontextmanager
async def local_client(shape: LocalShape, dashboard: bool, logs: Path) -> AsyncIterator[Client]:
    """A client of a new cluster on this machine, which writes its logs to `logs`; the cluster ends with it."""
    with OwnedDirectory("heddle-cluster-") as directory:
        cluster = LocalRolloutCluster(
            engines=shape.engines,
            tool_workers=shape.tool_workers,
            tool_cpus=shape.tool_cpus,
            trainers=shape.trainers,
            dashboard=dashboard,
            directory=directory,
            logs=logs,
            asynchronous=True,
            hardware=shape.hardware,
        )
        async with cluster_client(cluster, logs) as client:
            yield client


@contextlib.asynccontextmanager
async def cluster_client(cluster: SupervisedCluster, logs: Path) -> AsyncIterator[Client]:
    """A client of a cluster that is not started yet, and ends with it.

    A `BadInput` raised inside that is about an engine gets the last lines of its log.
    """
    # A cancelled start would leave a scheduler behind, and a start takes half a second: wait for it.
    starting = asyncio.ensure_future(_start(cluster))
    try:
        await asyncio.shield(starting)
        async with Client(cluster, asynchronous=True) as client:
            yield client
    except BadInput as error:
        if "engine" not in str(error) or not starting.done() or starting.exception() is not None:
            raise
        where = "" if "(log: " in str(error) else f" (logs: {logs})"
        raise BadInput(f"{error}{where}{_engine_log_tail(logs)}") from None
    except (ClusterProcessFailed, RuntimeError) as error:
        # Dask wraps that of a scheduler, not that of a worker.
        if not isinstance(error, ClusterProcessFailed) and not isinstance(error.__cause__, ClusterProcessFailed):
            raise
        raise BadInput(f"{error} (logs: {logs})") from None
    finally:
        await asyncio.wait([starting])
        closing: Any = cluster.close()
        await closing


def check_address(address: str) -> None:
    """Raise `ValueError` for what is no address, or of another transport, at which Dask would fail by itself."""
    scheme, place = parse_address(address)
    parse_host_port(place)
    if scheme not in ("tcp", "tls"):
        raise ValueError(f"{scheme}:// is neither tcp:// nor tls://")


async def _start(cluster: SupervisedCluster) -> None:
    await cluster


async def workers_joined(client: Client, shape: LocalShape) -> None:
    """Wait until every process of the local cluster has joined."""
    wanted = shape.engines + shape.tool_workers + shape.trainers
    try:
        joined: Any = client.wait_for_workers(wanted, timeout=JOIN_TIMEOUT_S)  # type: ignore[func-returns-value]
        await joined
    except TimeoutError:
        raise BadInput(
            f"fewer than {wanted} worker processes of the local cluster run after {JOIN_TIMEOUT_S:.0f} s: "
            "ask for fewer engines or tool workers, or free memory"
        ) from None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Credentials of a client: PEM files; None: as Dask's configuration says (``distributed.comm.tls``)."""

    ca_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def security(self, address: str) -> Security:
        """What a client of the scheduler at `address` needs."""
        given = {"tls_ca_file": self.ca_file, "tls_client_cert": self.cert, "tls_client_key": self.key}
        paths = {name: str(path) for name, path in given.items() if path is not None}
        security = Security(**paths)
        try:
            context = security.get_connection_args("client").get("ssl_context")
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise BadInput(f"the TLS credentials for {address} cannot be used: {error}") from None
        encrypted = parse_address(address)[0] == "tls"
        if encrypted and context is None:
            raise BadInput(
                f"{address} needs TLS credentials: give --tls-ca-file, --tls-cert and --tls-key (of heddle rollout), "
                "or set distributed.comm.tls in Dask's configuration"
            )
        if security.require_encryption and not encrypted:
            asked = "TLS credentials were given" if paths else "Dask's configuration requires encryption"
            raise BadInput(f"{address} is not encrypted, and {asked}: use tls://HOST:PORT")
        return security


@contextlib.asynccontextmanager
async def remote_client(address: str, timeout_s: float, tls: TlsFiles | None = None) -> AsyncIterator[Client]:
    """A client of the scheduler at `address`; says so on stderr where the connection is open to others."""
    try:
        check_address(address)
        warning = unencrypted(address)
        security = (tls or TlsFiles()).security(address)
        if warning:
            one_line(f"warning: {warning}")
        client = await Client(address, asynchronous=True, timeout=timeout_s, security=security)
    except BadInput:
        raise
    except (OSError, ValueError) as error:
        said = f"{error}".strip().splitlines()
        raise BadInput(
            f"no Dask scheduler answers at {address} within {timeout_s:.0f} s ({said[0] if said else ''}): "
            "give the address that `dask scheduler` prints, such as tcp://HOST:8786"
        ) from None
    async with client:
        yield client


def _engine_log_tail(directory: Path) -> str:
    """The last lines of the engine log that was written last, as the end of a one-line message."""
    logs = sorted(directory.rglob("engine.log"), key=lambda path: path.stat().st_mtime)
    tail = log_tail(logs[-1]) if logs else ""
    return f"; last lines of its log: {tail}" if tail else ""
