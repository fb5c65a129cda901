"""`python -m heddle_dask.engines.emulated --uds PATH --spec JSON`: one emulated engine on a Unix socket."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time

import uvloop

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.emulated.server import serve
from heddle_dask.engines.emulated.traits import traits_of
from heddle_dask.engines.spec import EngineSpec


async def _serve_until_asked(spec: EngineSpec, address: EngineAddress) -> None:
    task = asyncio.ensure_future(serve(spec, address))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def main() -> int:
    """Run the server; exit code 0 when asked to end, 1 when it could not start."""
    parser = argparse.ArgumentParser(prog="python -m heddle_dask.engines.emulated")
    listen = parser.add_mutually_exclusive_group(required=True)
    listen.add_argument("--uds", default="", help="path of a Unix socket")
    listen.add_argument("--port", type=int, default=0, help="loopback port")
    parser.add_argument("--spec", required=True, help="an EngineSpec as JSON")
    options = parser.parse_args()
    try:
        spec = EngineSpec.from_mapping(json.loads(options.spec))
        faults = traits_of(spec).faults
        time.sleep(faults.start_delay_s)
        if faults.fail_start is not None:
            print(faults.fail_start, file=sys.stderr)
            return 1
        collect_seldom()
        uvloop.run(_serve_until_asked(spec, EngineAddress(options.uds, options.port)))
    except (BadInput, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
