"""An external baseline: PyPI's ``vllm-router`` in front of the same engines, with a plain asyncio client.

The router runs as shipped: as a separate process, with default options except the ports and the policy. It forwards
``/inference/v1/generate``, the endpoint of this package's workers, and its policies route on the token ids there
(`cache_aware` keeps a tree of them), so the engines get exactly the same requests. docs/baselines.md has the results.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib import util
from pathlib import Path

import aiohttp

from benchmarks.live_setup import ARM_PREFIX, Fleet, LiveRow, Workload
from benchmarks.process_usage import cpu_by_kind, cpu_since
from benchmarks.router_client import RouterClient, replay, together
from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.engines.address import free_port
from heddle_dask.engines.process import EngineProcess, likely_cause
from heddle_dask.engines.supervised_process import SupervisedProcess

ROUTER_POLICIES = (
    "round_robin",
    "cache_aware",
    "sticky_least_loaded",
    "power_of_two",
    "consistent_hash",
    "random",
)
"""The router's policies that need only engines. Its `kv_aware` needs engines that publish cache events."""

ROUTER_OPTIONS = ("cache-threshold", "balance-abs-threshold", "balance-rel-threshold")
"""Options of the router that an arm may set, all for its policy `cache_aware`."""

ALIVE = "alive"
"""Option of an arm that the client carries out: at most so many trajectories are under way."""

ENGINES_START_S = 300.0
_ROUTER_START_S = 30.0
_POLL_S = 0.05
# The router uses proxy variables even for loopback addresses. Its --log-level has no level between info and error.
_ENVIRONMENT = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "RUST_LOG": "warn"}
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


def check_router(policy: str, options: Sequence[str] = ()) -> None:
    """Refuse an arm that cannot run, before anything is started.

    Parameters
    ----------
    policy
        One of `ROUTER_POLICIES`.
    options
        Written ``name=value``; the names are `ROUTER_OPTIONS` and `ALIVE`, the values numbers.

    Raises
    ------
    BadInput
        Unknown policy or option, or vllm-router is not installed.
    """
    if policy not in ROUTER_POLICIES:
        raise BadInput(f"vllm-router policy {policy!r} is unknown: use {', '.join(ROUTER_POLICIES)}")
    for option in options:
        name, _, value = option.partition("=")
        if name == ALIVE:
            if not value.isdecimal() or int(value) < 1:
                raise BadInput(f"vllm-router option {option!r}: give a whole number from 1, as in {name}=64")
            continue
        if name not in ROUTER_OPTIONS:
            known = ", ".join((*ROUTER_OPTIONS, ALIVE))
            raise BadInput(f"vllm-router option {name!r} is unknown: use {known}")
        if not value.replace(".", "", 1).isdigit():
            raise BadInput(f"vllm-router option {option!r}: give a number, as in {name}=1")
    if util.find_spec("vllm_router") is None:
        raise BadInput(
            f"vllm-router is not installed in {sys.prefix}: run `pip install '.[bench]'` in a checkout of heddle_dask"
        )


def most_alive(options: Sequence[str]) -> int | None:
    """The limit of trajectories under way of an arm with these (checked) options; the last one counts."""
    given = [value for name, _, value in (option.partition("=") for option in options) if name == ALIVE]
    return int(given[-1]) if given else None


async def run_router(
    workload: Workload, fleet: Fleet, policy: str, repeat: int, bound_s: float, options: Sequence[str] = ()
) -> LiveRow:
    """One run: start cold engines and the router, replay, and stop everything.

    Parameters
    ----------
    policy, options
        See `check_router`.
    repeat, bound_s
        For the row: number of the repeat, and lower bound of the workload's makespan.

    Raises
    ------
    BadInput
        See `check_router`; or the workload's file is no trace.
    HeddleError
        Engines or router did not start, a step failed, or a result has other tokens than planned. No process is left
        running.
    """
    check_router(policy, options)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heddle-router-")))
        spec = replace(fleet.spec, tcp=True)  # the router speaks no Unix sockets
        engines = [EngineProcess(spec, directory / f"engine-{n}") for n in range(fleet.engines)]
        for engine in engines:
            stack.push_async_callback(engine.stop)
        addresses = await together([engine.start(ENGINES_START_S) for engine in engines])
        urls = [address.url for address in addresses]
        return await route(workload, fleet, urls, policy, repeat, bound_s, options)


async def route(
    workload: Workload,
    fleet: Fleet,
    urls: Sequence[str],
    policy: str,
    repeat: int,
    bound_s: float,
    options: Sequence[str] = (),
) -> LiveRow:
    """Like `run_router`, on running engines at `urls`; the router ends with the run."""
    arm = ":".join((ARM_PREFIX + policy, *options))
    environment = workload.environment(salt=f"{arm} {repeat} ", max_context_tokens=fleet.spec.named_context_tokens)
    tasks = environment.tasks(workload.tasks, workload.seed)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heddle-router-")))
        router_url = await stack.enter_async_context(running_router(policy, options, urls, directory))
        client = await stack.enter_async_context(RouterClient(router_url))
        before_s = cpu_by_kind()
        replayed = await replay(
            client,
            environment,
            tasks,
            seed=workload.seed,
            max_context_tokens=fleet.spec.named_context_tokens,
            alive=most_alive(options),
        )
        cpu_s = cpu_since(before_s)
    return LiveRow(
        workload=workload.name,
        arm=arm,
        repeat=repeat,
        tokens_per_s=round(replayed.generated_tokens / replayed.makespan_s, 1),
        makespan_s=round(replayed.makespan_s, 3),
        bound_share=round(bound_s / replayed.makespan_s, 4),
        preemptions=0,
        moves={},
        cpu_s=cpu_s,
    )


@asynccontextmanager
async def running_router(
    policy: str, options: Sequence[str], worker_urls: Sequence[str], directory: Path
) -> AsyncIterator[str]:
    """The router's URL while the router runs; it ends with the context, or with this process.

    Raises
    ------
    HeddleError
        It did not start, or the body of the context failed; the message has the cause from the router's log.
    """
    port = free_port()
    process = SupervisedProcess(_command(policy, options, worker_urls, port), directory, "router", env=_ENVIRONMENT)
    process.launch()
    try:
        url = f"http://127.0.0.1:{port}"
        await _until_ready(process, url, len(worker_urls))
        yield url
    except HeddleError as error:
        raise HeddleError(f"vllm-router, {policy}: {error}{_said(process)}") from error
    finally:
        await process.stop()


def _command(policy: str, options: Sequence[str], worker_urls: Sequence[str], port: int) -> list[str]:
    argv = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--worker-urls", *worker_urls, "--policy", policy]
    # Its default port for metrics is fixed: two routers on one machine would conflict.
    argv += ["--prometheus-port", str(free_port())]
    for option in options:
        name, _, value = option.partition("=")
        if name in ROUTER_OPTIONS:
            argv += [f"--{name}", value]
    return argv


def _said(process: SupervisedProcess) -> str:
    """The error from the router's log, in brackets; empty without one."""
    lines = [_COLOUR.sub("", line) for line in process.log_tail(400)]
    cause = likely_cause(tuple(line for line in lines if not line.startswith("DEBUG: ")))
    return f" (router's log: {cause})" if cause else ""


async def _until_ready(process: SupervisedProcess, url: str, workers: int) -> None:
    deadline = time.monotonic() + _ROUTER_START_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session:
        while not await _sees(session, url, workers):
            if process.returncode is not None:
                raise HeddleError(f"ended during start-up (exit code {process.returncode})")
            if time.monotonic() >= deadline:
                raise HeddleError(f"did not see its {workers} engines within {_ROUTER_START_S:g} s")
            await asyncio.sleep(_POLL_S)


async def _sees(session: aiohttp.ClientSession, url: str, workers: int) -> bool:
    try:
        async with session.get(f"{url}/readiness") as response:
            return response.status == 200 and (await response.json())["healthy_workers"] == workers
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
