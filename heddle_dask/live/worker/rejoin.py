"""A worker that has lost its scheduler comes back where that goes on: its nanny starts it again.

After a cut of the network the scheduler knows the worker no longer, and Dask would end worker and nanny for good.
"""

from __future__ import annotations

import asyncio
import time

from distributed import Worker
from distributed.comm import parse_address, parse_host_port

from heddle_dask.live.wire import _dask_internals as dask

REJOIN_S = 300.0
"""A scheduler that cannot be reached for so long is taken for one that has ended."""
_PAUSE_S = 1.0
_CONNECT_S = 5.0


def comes_back(worker: Worker) -> None:
    """Have the nanny of this worker start it again when it has lost a scheduler that goes on."""
    dask.ask_before_loss_ends_nanny(worker, lambda: _scheduler_goes_on(worker))


async def _scheduler_goes_on(worker: Worker) -> bool:
    """Wait until the scheduler takes connections, also after a pause: one that ends does so for a moment."""
    host, port = parse_host_port(parse_address(worker.scheduler.address)[1])
    deadline_s = time.monotonic() + REJOIN_S
    taken = 0
    while time.monotonic() < deadline_s:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            taken += 1
        except ConnectionRefusedError:
            return False
        except OSError:  # also the time limit: the network is cut
            taken = 0
        if taken == 2:
            return True
        await asyncio.sleep(_PAUSE_S)
    return False
