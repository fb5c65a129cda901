"""A real cluster with emulated engines, and what the live tests do to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client
from worlds.journal_records import read_journal

from heddle_dask.engines import watchdog
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.live.clusters import local
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.clusters.worker_command import worker_arguments
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.records.trajectory import TrajectoryRecord

HANG_S = 240
ENGINE = "heddle_dask.engines.emulated"


def run(coroutine: Coroutine[Any, Any, Any], hang_s: float = HANG_S) -> Any:
    """Run to the end; the ceiling is for hangs only."""
    return asyncio.run(asyncio.wait_for(coroutine, hang_s))


def emulated(model: str, *, seconds_per_token: float = 0.002, slots: int = 4, **options: Any) -> EngineSpec:
    cost = {"seconds_per_token": seconds_per_token}
    own = {name: options.pop(name) for name in ("faults", "time_scale", "emulation", "script") if name in options}
    chosen = EmulatedOptions(cost=cost, **own)
    return EngineSpec("emulated", model, slots=slots, max_model_len=4096, options=chosen, **options)


@contextlib.contextmanager
def without_nannies() -> Iterator[None]:
    """Local clusters that start inside have none, for tests in which no worker dies: a quarter of a worker's cost."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local, "worker_arguments", lambda *given: [*worker_arguments(*given), "--no-nanny"])
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            patched.setenv(name, "1")  # as a nanny does
        yield


@contextlib.asynccontextmanager
async def cluster(
    engines: int = 2, *, nannies: bool = True, **options: Any
) -> AsyncIterator[tuple[LocalRolloutCluster, Client]]:
    async with contextlib.AsyncExitStack() as stack:
        if not nannies:
            stack.enter_context(without_nannies())
        made = LocalRolloutCluster(engines, tool_cpus=8, dashboard=False, asynchronous=True, **options)
        await stack.enter_async_context(made)
        yield made, await stack.enter_async_context(Client(made, asynchronous=True))


async def until(condition: Callable[[], Any]) -> Any:
    """Wait for it as long as it takes: `run` ends what hangs, and no machine is too slow."""
    while not (found := condition()):
        await asyncio.sleep(0.01)
    return found


idle_clusters: set[str] = set()
"""Directories of shared clusters that no test uses now: their processes are not there for a test that looks."""


def descendants(word: str) -> list[psutil.Process]:
    """Our own descendants whose command line holds `word`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            line = process.cmdline()
            idle = any(directory in part for part in line for directory in idle_clusters)
            if not idle and any(word in part for part in line):
                found.append(process)
    return found


def worker_process(name: str) -> psutil.Process:
    """The process that runs a Dask worker: a nanny's only child that is no engine, or where there is none, itself."""
    around = [p for p in descendants(name) if watchdog.__file__ in p.cmdline() and "dask" in p.cmdline()]
    inside = [child for p in around for child in p.children() if watchdog.__file__ not in child.cmdline()]
    (started,) = [p for p in inside if "--no-nanny" in around[0].cmdline() or p.cmdline()[1:3] == ["-m", "dask"]]
    if "--no-nanny" in around[0].cmdline():
        return started
    (worker,) = [c for c in started.children() if not any("resource_tracker" in part for part in c.cmdline())]
    return worker


def engine_processes(worker_name: str) -> list[psutil.Process]:
    """The emulated engine of a Dask worker and the watchdog around it, oldest first."""
    inside = worker_process(worker_name).children(recursive=True)
    found = [process for process in inside if ENGINE in " ".join(process.cmdline())]
    return sorted(found, key=lambda process: process.create_time())


def engine_process(worker_name: str) -> psutil.Process:
    """The engine itself."""
    return engine_processes(worker_name)[-1]


def check_against_engine(records: Sequence[TrajectoryRecord], seen_path: Path) -> None:
    """Each stored trajectory's segments, joined, are what went to the engine and what came from it."""
    seen: dict[tuple[str, int], list[Any]] = {}
    for line in seen_path.read_text().splitlines():
        row = json.loads(line)
        seen.setdefault((row["trajectory"], row["step"]), []).append(row)
    for record in records:
        (branch,) = record.branches
        joined = np.concatenate([segment.token_ids for segment in branch.segments()])
        assert record.steps
        for step in record.steps:
            # A step that was stopped for another went to an engine in parts.
            at = step.token_start
            for part in seen[record.trajectory_id, step.step_index]:
                assert joined[:at].tolist() == part["seen"]
                assert joined[at : at + len(part["sampled"])].tolist() == part["sampled"]
                at += len(part["sampled"])
            assert at == step.token_stop
            logprobs = branch.logprobs[step.token_start : step.token_stop]
            assert np.isfinite(logprobs).all() and (logprobs <= 0).all()
            assert (branch.policy_version[step.token_start : step.token_stop] == 0).all()


def control_lines(out: Path) -> list[Any]:
    """The controller's journal of a run: (event, commands) lines."""
    records = read_journal(journal_path(out))
    return [line for kind, body in records if kind == "control" for line in body["lines"]]


def lives(process: psutil.Process) -> bool:
    """Whether it has not ended; one that ends while it is asked has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
