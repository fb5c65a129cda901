"""Which scheduler ``heddle top`` watches, and with which credentials."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distributed.comm import parse_address, parse_host_port
from distributed.security import Security

from heddle_dask.cli.cluster_choice import TlsFiles
from heddle_dask.cli.rollout.out_path import RUNS
from heddle_dask.cli.rollout.run_logs import logs_path
from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.credentials import CONNECTION_FILE, Connection, read_connection


@dataclass(frozen=True, slots=True)
class Place:
    """Address of a scheduler, and what a client of it needs."""

    address: str
    security: Security


def place_of(
    run: Path | None,
    scheduler: str | None,
    scheduler_file: Path | None,
    ca_file: Path | None,
    cert: Path | None,
    key: Path | None,
) -> Place:
    """The scheduler that was asked for.

    Raises
    ------
    BadInput
        There is none, the address is malformed, or its credentials are missing.
    """
    if scheduler is not None:
        connection = Connection(scheduler)
    elif scheduler_file is not None:
        connection = read_connection(scheduler_file)
    else:
        connection = read_connection(_of_run(run))
    address = connection.address
    try:
        scheme, location = parse_address(address)
        parse_host_port(location)
        if scheme not in ("tcp", "tls"):
            raise ValueError(f"{scheme}:// is neither tcp:// nor tls://")
    except ValueError as error:
        raise BadInput(f"{address} is no address of a scheduler ({error}): use tcp://HOST:8786") from None
    told = (connection.tls_ca_file, connection.tls_cert, connection.tls_key)
    files = (
        given or (Path(path) if path else None)
        for given, path in zip((ca_file, cert, key), told, strict=True)
    )
    return Place(address, TlsFiles(*files).security(address))


def _of_run(run: Path | None) -> Path:
    """The connection file of a run with a cluster of its own; of the latest one in ``runs/``."""
    if run is not None:
        if not run.name.removesuffix(".zarr"):
            raise BadInput(f"{str(run)!r} names no run: give a path such as runs/RUN.zarr")
        found = _latest([logs_path(run)])
        if found is None:
            raise BadInput(
                f"no rollout to {run} with a cluster of its own runs on this machine: "
                "for another cluster use --scheduler or --scheduler-file"
            )
        return found
    found = _latest(RUNS.glob("*.logs"))
    if found is None:
        raise BadInput(
            f"no rollout with a cluster of its own runs in {RUNS}/: give its RUN.zarr, --scheduler or --scheduler-file"
        )
    return found


def _latest(logs: object) -> Path | None:
    files = [file for each in logs for file in each.glob(f"session-*/{CONNECTION_FILE}")]  # type: ignore[attr-defined]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)
