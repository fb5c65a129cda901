"""How a worker of ours is started: the command line of ``dask worker`` and its environment.

The same on this machine (`local.py`) and in a job of a batch system (`job/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from heddle_dask.live.wire.messages import ENGINE_RESOURCE, MODEL_RESOURCE, TRAINER_RESOURCE

# A coroutine task takes a slot and no thread: slots must never be the limit.
WORKER_SLOTS = 4096
PRELOADS = "heddle_dask.preload"  # their package; Dask imports them, and nothing here does

# uvloop takes a quarter off the latency of a message. Dask's profiler samples threads, in which none of our tasks run,
# 100 times a second in every process. Its look for a stalled event loop wakes every process 50 times a second, nannies
# too; stalls of 3 s, of which it warns, are seen at 2 a second (idle, two engines: 48 in place of 128 ms of CPU per s).
QUICK_LOOP: Mapping[str, str] = {
    "DASK_DISTRIBUTED__ADMIN__EVENT_LOOP": "uvloop",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "DASK_DISTRIBUTED__ADMIN__TICK__INTERVAL": "500ms",
    # Twice a second in every process, for figures that only Dask's own dashboard shows.
    "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",
}


def worker_arguments(
    scheduler: str,
    name: str,
    resources: Mapping[str, float],
    scratch: Path,
    connection: Sequence[str],
) -> list[str]:
    """Arguments of ``dask`` that start a worker with resource tags and a nanny, which restarts it when it dies.

    Parameters
    ----------
    scratch
        Directory in which the worker makes its own.
    connection
        Options of its connections: protocol and TLS files, host, ports.
    """
    tags = ",".join(f"{key}={value:g}" for key, value in resources.items())
    kinds = {
        TRAINER_RESOURCE: "trainer_worker",
        MODEL_RESOURCE: "model_worker",
        ENGINE_RESOURCE: "rollout_worker",
    }
    kind = next((kind for tag, kind in kinds.items() if tag in resources), "tool_worker")
    return [
        "worker",
        scheduler,
        "--name",
        name,
        "--nthreads",
        str(WORKER_SLOTS),
        "--resources",
        tags,
        "--memory-limit",
        "0",
        "--no-dashboard",
        # There still is an HTTP server, which would listen on all interfaces.
        "--dashboard-address",
        "127.0.0.1:0",
        *connection,
        "--local-directory",
        str(scratch / name),
        "--preload",
        f"{PRELOADS}.{kind}",
    ]
