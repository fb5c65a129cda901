"""``heddle top``: which scheduler it watches, and the loop that draws its snapshot until cluster or user end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.core import rpc
from distributed.security import Security
from rich.live import Live

from heddle_dask.cli.cluster_choice import TlsFiles, check_address
from heddle_dask.cli.one_line import one_line
from heddle_dask.cli.rollout.run_logs import logs_path
from heddle_dask.cli.shared_options import print_json
from heddle_dask.cli.stored_run import RUNS
from heddle_dask.cli.top.screen import WIDTH, screen
from heddle_dask.core.errors import BadInput
from heddle_dask.live.clusters.credentials import CONNECTION_FILE, Connection, read_connection
from heddle_dask.live.wire.cluster_messages import GetSnapshot
from heddle_dask.live.wire.transport import ask_over
from heddle_dask.views.drawing.safe_console import SafeConsole

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
_ONCE_LINES = 40


@dataclass(frozen=True, slots=True)
class Place:
    """Address of a scheduler, what a client of it needs, and the run that is looked at; empty: all."""

    address: str
    security: Security
    run: str = ""


def place_of(
    run: Path | None,
    scheduler: str | None,
    scheduler_file: Path | None,
    ca_file: Path | None,
    cert: Path | None,
    key: Path | None,
    only: str = "",
) -> Place:
    """The scheduler that was asked for."""
    if scheduler is not None:
        connection = Connection(scheduler)
    elif scheduler_file is not None:
        connection = read_connection(scheduler_file)
    else:
        connection = read_connection(_of_run(run))
    address = connection.address
    try:
        check_address(address)
    except ValueError as error:
        raise BadInput(f"{address} is no address of a scheduler ({error}): use tcp://HOST:8786") from None
    told = (connection.tls_ca_file, connection.tls_cert, connection.tls_key)
    files = (given or (Path(path) if path else None) for given, path in zip((ca_file, cert, key), told, strict=True))
    return Place(address, TlsFiles(*files).security(address), only)


def _of_run(run: Path | None) -> Path:
    """The connection file of a run with a cluster of its own; of the latest one in ``runs/``."""
    if run is not None:
        if not run.name.removesuffix(".zarr"):
            raise BadInput(f"{str(run)!r} names no run: give a path such as runs/RUN.zarr")
        found = _latest([logs_path(run), logs_path(run / "rollout.zarr")])
        if found is None:
            raise BadInput(
                f"no rollout to {run} with a cluster of its own runs on this machine: "
                "for another cluster use --scheduler or --scheduler-file"
            )
        return found
    found = _latest(path for pattern in ("*.logs", "*/rollout.logs") for path in RUNS.glob(pattern))
    if found is None:
        raise BadInput(
            f"no rollout with a cluster of its own runs in {RUNS}/: give its RUN.zarr, --scheduler or --scheduler-file"
        )
    return found


def _latest(logs: object) -> Path | None:
    files = [file for each in logs for file in each.glob(f"session-*/{CONNECTION_FILE}")]  # type: ignore[attr-defined]
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def watch(place: Place, *, interval_s: float, once: bool, as_json: bool) -> None:
    """Show what happens there until it ends or the user does."""
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # a scheduler that ends is told in one line
    asyncio.run(_watch(place, interval_s, once, as_json))


async def _watch(place: Place, interval_s: float, once: bool, as_json: bool) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    arguments = place.security.get_connection_args("client")
    # The only way to end it, so no failure: the screen is given back by the contexts below.
    with contextlib.suppress(asyncio.CancelledError):
        async with rpc(place.address, timeout=CONNECT_TIMEOUT_S, connection_args=arguments) as scheduler:
            first = await _first(scheduler, place)
            if once or as_json:
                await _print(scheduler, place, first, interval_s, once, as_json)
            else:
                await _draw(scheduler, place, first, interval_s)


async def _first(scheduler: Any, place: Place) -> Mapping[str, Any]:
    address = place.address
    try:
        answer = await asyncio.wait_for(
            ask_over(scheduler, GetSnapshot(place.run)), CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S
        )
    except (OSError, TimeoutError) as error:
        said = str(error).strip().splitlines()
        raise BadInput(
            f"no Dask scheduler answers at {address} within {CONNECT_TIMEOUT_S:.0f} s"
            f"{f' ({said[0]})' if said else ''}: it has ended, or this is another address or key"
        ) from None
    except RuntimeError:
        raise BadInput(
            f"the Dask scheduler at {address} has no heddle plugin: start it with `--preload "
            "heddle_dask.preload.scheduler`, or wait until a rollout has registered it"
        ) from None
    if "counts" not in answer.snapshot:
        raise BadInput(f"no run {place.run!r} is open there: {', '.join(answer.snapshot['runs']) or 'none is'}")
    return answer.snapshot


async def _pictures(
    scheduler: Any, place: Place, first: Mapping[str, Any], interval_s: float
) -> AsyncIterator[tuple[Mapping[str, Any], str]]:
    """Snapshots, and a note about the connection, until the scheduler is gone."""
    snapshot, note = first, ""
    asked_s = time.monotonic()
    while True:
        yield snapshot, note
        await asyncio.sleep(max(0.0, asked_s + interval_s - time.monotonic()))
        asked_s = time.monotonic()
        try:
            latest = await asyncio.wait_for(ask_over(scheduler, GetSnapshot(place.run)), ANSWER_TIMEOUT_S)
            note = "" if "counts" in latest.snapshot else f"run {place.run} has ended; what you see is old"
            snapshot = latest.snapshot if not note else snapshot
        except TimeoutError:
            note = "the scheduler does not answer; what you see is old"
        except (OSError, RuntimeError):
            return


async def _print(
    scheduler: Any, place: Place, first: Mapping[str, Any], interval_s: float, once: bool, as_json: bool
) -> None:
    async for snapshot, _ in _pictures(scheduler, place, first, interval_s):
        if as_json:
            print_json(snapshot)
        else:
            console = SafeConsole()
            # At most as wide as a line that a person reads; a file or a pipe is 80 columns wide.
            console.print(screen(snapshot, _ONCE_LINES, min(console.width, 120)))
        if once:
            return
    one_line(f"the scheduler at {place.address} has ended")


async def _draw(scheduler: Any, place: Place, first: Mapping[str, Any], interval_s: float) -> None:
    console = SafeConsole()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        async for snapshot, note in _pictures(scheduler, place, first, interval_s):
            width = min(console.width, max(WIDTH, 120))
            live.update(screen(snapshot, console.height, width, note), refresh=True)
    one_line(f"the scheduler at {place.address} has ended")
