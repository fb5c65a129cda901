"""The loop of ``heddle top``: ask for the snapshot, draw it, until the cluster or the user ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from distributed.core import rpc
from rich.console import Console
from rich.live import Live

from heddle_dask.cli.one_line import one_line
from heddle_dask.cli.shared_options import print_json
from heddle_dask.cli.top.place import Place
from heddle_dask.cli.top.screen import WIDTH, screen
from heddle_dask.core.errors import BadInput
from heddle_dask.live.wire.cluster_messages import GetSnapshot
from heddle_dask.live.wire.transport import ask_over

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
_ONCE_LINES = 40


def watch(place: Place, *, interval_s: float, once: bool, as_json: bool) -> None:
    """Show what happens there until it ends or the user does.

    Raises
    ------
    BadInput
        Nobody answers there, or it is no scheduler with our plugin.
    """
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
            first = await _first(scheduler, place.address)
            if once or as_json:
                await _print(scheduler, place.address, first, interval_s, once, as_json)
            else:
                await _draw(scheduler, place.address, first, interval_s)


async def _first(scheduler: Any, address: str) -> Mapping[str, Any]:
    try:
        answer = await asyncio.wait_for(
            ask_over(scheduler, GetSnapshot()), CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S
        )
    except (OSError, TimeoutError) as error:
        said = str(error).strip().splitlines()
        raise BadInput(
            f"no Dask scheduler answers at {address} within {CONNECT_TIMEOUT_S:.0f} s"
            f"{f' ({said[0]})' if said else ''}: it has ended, or this is another address or key"
        ) from None
    except RuntimeError:
        raise BadInput(
            f"the Dask scheduler at {address} has no heddle plugin: start it with `--preload workers.scheduler`, "
            "or wait until a rollout has registered it"
        ) from None
    return answer.snapshot


async def _pictures(
    scheduler: Any, address: str, first: Mapping[str, Any], interval_s: float
) -> AsyncIterator[tuple[Mapping[str, Any], str]]:
    """Snapshots, and a note about the connection, until the scheduler is gone."""
    snapshot, note = first, ""
    asked_s = time.monotonic()
    while True:
        yield snapshot, note
        await asyncio.sleep(max(0.0, asked_s + interval_s - time.monotonic()))
        asked_s = time.monotonic()
        try:
            snapshot = (await asyncio.wait_for(ask_over(scheduler, GetSnapshot()), ANSWER_TIMEOUT_S)).snapshot
            note = ""
        except TimeoutError:
            note = "the scheduler does not answer; what you see is old"
        except (OSError, RuntimeError):
            return


async def _print(
    scheduler: Any, address: str, first: Mapping[str, Any], interval_s: float, once: bool, as_json: bool
) -> None:
    async for snapshot, _ in _pictures(scheduler, address, first, interval_s):
        if as_json:
            print_json(snapshot)
        else:
            console = Console()
            # At most as wide as a line that a person reads; a file or a pipe is 80 columns wide.
            console.print(screen(snapshot, _ONCE_LINES, min(console.width, 120)))
        if once:
            return
    one_line(f"the scheduler at {address} has ended")


async def _draw(scheduler: Any, address: str, first: Mapping[str, Any], interval_s: float) -> None:
    console = Console()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        async for snapshot, note in _pictures(scheduler, address, first, interval_s):
            width = min(console.width, max(WIDTH, 120))
            live.update(screen(snapshot, console.height, width, note), refresh=True)
    one_line(f"the scheduler at {address} has ended")
