"""The gateway: what a request over HTTP adds to `ctx.generate`, requests in a second, and many open streams.

Cluster, gateway and engine are real processes; the engine is the emulated one, which takes exactly the time of its cost
model. The agents are clients in a process of their own. *Added* is the median duration of a request of an agent less
that of `ctx.generate` in a rollout of as many trajectories on the same kind of cluster, with the same steps of 1 s.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import click
import numpy as np
import uvloop

from benchmarks.emulated_rollouts import rolled_out
from benchmarks.gateway_clients import ClientFigures, ClientOrders
from benchmarks.process_usage import cpu_by_kind, cpu_since
from benchmarks.tables import Column, print_measured_rows
from heddle_dask.cli.engine_option import chosen_model
from heddle_dask.cli.shared_options import COUNT, POSITIVE, shared_options
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.emulated.options import EmulatedOptions
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Context, Task
from heddle_dask.live.driver.options import Budget

STEP_S = 1.0
STEP_TOKENS = 100
TURNS = 10
STREAM_TOKENS = 30
STREAM_S = 30.0
_NO_END = 1e12


@dataclass(frozen=True, slots=True)
class GatewayRow:
    """The figures of one run; None where it does not measure one.

    Attributes
    ----------
    request_ms_p50, generate_ms_p50
        Median duration of a request of an agent, and of `ctx.generate`, with steps of `STEP_S`.
    cpu_ms
        CPU of each kind of process for a request.
    whole_streams
        Of `trajectories` streams, those that came whole.
    """

    trajectories: int
    request_ms_p50: float | None = None
    generate_ms_p50: float | None = None
    added_ms_p50: float | None = None
    added_ms_p90: float | None = None
    requests_per_s: float | None = None
    cpu_ms: Mapping[str, float] = field(default_factory=dict)
    whole_streams: int = 0
    most_open: int = 0


def _spec(model: str, seconds_per_token: float, seed: int) -> EngineSpec:
    """An engine whose steps have the length that was asked for."""
    options = EmulatedOptions({"seconds_per_token": seconds_per_token}, emulation={"mean_length_tokens": _NO_END})
    return EngineSpec("emulated", model, slots=1024, max_model_len=65_536, seed=seed, options=options)


@dataclass(slots=True)
class _Equal:
    """Equal tasks."""

    name = "gateway"

    def tasks(self, count: int, seed: int) -> Sequence[Task]:
        return [Task(f"t{i}", "x") for i in range(count)]


@dataclass(slots=True)
class PlainTurns(_Equal):
    """The turns of `ClientOrders.turns` by `ctx.generate`."""

    seed: int
    durations_s: list[float] = field(default_factory=list)

    async def solve(self, task: Task, ctx: Context) -> None:
        await asyncio.sleep(random.Random(f"{self.seed}{task.task_id}").uniform(0, STEP_S))
        for turn in range(TURNS):
            began_s = time.perf_counter()
            ctx.append("user", f"turn {turn}")
            await ctx.generate(max_tokens=STEP_TOKENS)
            self.durations_s.append(time.perf_counter() - began_s)


@dataclass(slots=True)
class GatewayTurns(_Equal):
    """Trajectories whose steps are asked for by agents in another process, who begin when all have a key.

    Attributes
    ----------
    orders
        What they do; their keys and the address come from here.
    cpu_s
        By kind of process, while they ask.
    """

    count: int
    orders: ClientOrders
    figures: ClientFigures = field(default_factory=ClientFigures)
    cpu_s: dict[str, float] = field(default_factory=dict)
    _keys: list[str] = field(default_factory=list)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def solve(self, task: Task, ctx: Context) -> None:
        gate = await ctx.gateway()
        self._keys.append(gate.key)
        if len(self._keys) == self.count:
            try:
                await self._ask(gate.loopback_url)
            finally:
                self._ended.set()
        await self._ended.wait()
        if self.figures.errors:
            raise RuntimeError(f"{len(self.figures.errors)} agents failed: {self.figures.errors[0]}")

    def cpu_ms(self) -> dict[str, float]:
        """CPU of a request by kind of process."""
        count = max(1, len(self.figures.durations_s))
        return {kind: round(1000 * used_s / count, 2) for kind, used_s in self.cpu_s.items()}

    async def _ask(self, url: str) -> None:
        orders = ClientOrders(**{**asdict(self.orders), "url": url, "keys": self._keys})
        before_s = cpu_by_kind()
        clients = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.gateway_clients"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 26,
        )
        said, _ = await clients.communicate(json.dumps(asdict(orders)).encode())
        self.cpu_s = cpu_since(before_s)
        self.figures = ClientFigures(**json.loads(said))


async def _asked(agents: GatewayTurns, model: str, seconds_per_token: float) -> GatewayTurns:
    budget = Budget(max_steps=1_000_000, max_context_tokens=65_536)
    spec = _spec(model, seconds_per_token, agents.orders.seed)
    await rolled_out(agents, spec, agents.count, tool_cpus=4096, seed=agents.orders.seed, budget=budget)
    return agents


async def measure_added(model: str, count: int, seed: int) -> GatewayRow:
    """What a request adds to a step, at so many trajectories."""
    plain = PlainTurns(seed)
    budget = Budget(max_steps=1_000, max_context_tokens=65_536)
    await rolled_out(plain, _spec(model, STEP_S / STEP_TOKENS, seed), count, tool_cpus=64, seed=seed, budget=budget)
    orders = ClientOrders("", [], STEP_TOKENS, turns=TURNS, spread_s=STEP_S, seed=seed)
    asked = await _asked(GatewayTurns(count, orders), model, STEP_S / STEP_TOKENS)
    requests_ms, steps_ms = 1000 * np.array(asked.figures.durations_s), 1000 * np.array(plain.durations_s)
    p50, p90 = (np.percentile(requests_ms, at) - np.percentile(steps_ms, at) for at in (50, 90))
    return GatewayRow(
        count,
        request_ms_p50=round(float(np.median(requests_ms)), 2),
        generate_ms_p50=round(float(np.median(steps_ms)), 2),
        added_ms_p50=round(float(p50), 2),
        added_ms_p90=round(float(p90), 2),
        cpu_ms=asked.cpu_ms(),
    )


async def measure_rate(model: str, count: int, seconds: float, seed: int) -> GatewayRow:
    """Requests in a second of one gateway process, each for a step of one token that takes no time."""
    orders = ClientOrders("", [], 1, seconds=seconds, seed=seed)
    asked = await _asked(GatewayTurns(count, orders), model, 0.0)
    finished_s = asked.figures.finished_s
    return GatewayRow(
        count,
        requests_per_s=round(middle_rate(finished_s), 1),
        cpu_ms=asked.cpu_ms(),
    )


def middle_rate(finished_s: Sequence[float]) -> float:
    """Ends in a second, over the middle half of the time: without start and end."""
    first, last = min(finished_s), max(finished_s)
    low, high = first + 0.25 * (last - first), first + 0.75 * (last - first)
    return sum(low <= at < high for at in finished_s) / (high - low)


async def measure_streams(model: str, count: int, seed: int) -> GatewayRow:
    """So many streams, open at the same time."""
    orders = ClientOrders("", [], STREAM_TOKENS, streams=True, spread_s=STREAM_S / 6, seed=seed)
    asked = await _asked(GatewayTurns(count, orders), model, STREAM_S / STREAM_TOKENS)
    return GatewayRow(count, whole_streams=asked.figures.whole_streams, most_open=asked.figures.most_open)


async def measure_gateway(
    model: str,
    *,
    trajectories: int,
    streams: int,
    seconds: float,
    repeats: int,
    seed: int,
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[GatewayRow]:
    """All rows, each run on a cluster of its own."""
    rows = []
    for repeat in range(repeats):
        on_progress(f"added by a request, run {repeat + 1} of {repeats}")
        rows.append(await measure_added(model, trajectories, seed + repeat))
        on_progress(f"requests in a second, run {repeat + 1} of {repeats}")
        rows.append(await measure_rate(model, trajectories, seconds, seed + repeat))
    if streams:
        on_progress(f"{streams} streams")
        rows.append(await measure_streams(model, streams, seed))
    return rows


def _shown(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


COLUMNS: Sequence[Column] = (
    ("trajectories", lambda row: str(row.trajectories)),
    ("request p50 ms", lambda row: _shown(row.request_ms_p50)),
    ("generate p50 ms", lambda row: _shown(row.generate_ms_p50)),
    ("added p50 ms", lambda row: _shown(row.added_ms_p50)),
    ("p90", lambda row: _shown(row.added_ms_p90)),
    ("requests/s", lambda row: _shown(row.requests_per_s, 0)),
    ("CPU ms of a request", lambda row: ", ".join(f"{kind} {ms:.2f}" for kind, ms in row.cpu_ms.items())),
    ("whole streams", lambda row: str(row.whole_streams or "")),
    ("open at once", lambda row: str(row.most_open or "")),
)


@click.command("gateway")
@click.option("--trajectories", default=50, show_default=True, type=COUNT, help="Agents at the same time.")
@click.option("--streams", default=1000, show_default=True, type=click.IntRange(0), help="Open streams; 0: none.")
@click.option("--seconds", default=10.0, show_default=True, type=POSITIVE, help="In which requests are counted.")
@click.option("--model", default=None, help="Directory with a tokenizer [default: the shipped tiny-agent].")
@click.option("--repeats", default=1, show_default=True, type=COUNT, help="Runs of the first two.")
@shared_options
def gateway(
    trajectories: int, streams: int, seconds: float, model: str | None, repeats: int, as_json: bool, seed: int
) -> None:
    """What a request of an agent adds to a step, requests in a second, and open streams."""
    collect_seldom()
    rows = uvloop.run(
        measure_gateway(
            chosen_model(model, "emulated"),
            trajectories=trajectories,
            streams=streams,
            seconds=seconds,
            repeats=repeats,
            seed=seed,
            on_progress=lambda message: click.echo(message, err=True),
        )
    )
    print_measured_rows(rows, COLUMNS, as_json=as_json)
