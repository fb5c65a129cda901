"""What watching costs a rollout: steps per second with the dashboard's page open, closed, and not installed.

Two clusters stand side by side: the scheduler of one serves the dashboard, that of the other is started without it. In
each round every arm rolls out once for some seconds, in another order each time, so that the machine's drift falls on
all arms alike; the others then idle. What is compared is the ratio of an arm to the arm ``not installed`` of its round.

Steps take no time in the engine, so that the control plane is the limit: the worst case. ``open`` is a tab that
receives everything and draws nothing, in a process of its own; ``top`` is ``heddle top`` and a scrape of ``/metrics``,
each once per second. Opening the page, which takes the scheduler some hundred milliseconds once, is not part of a
round.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click
import psutil
import uvloop
from distributed import Client

from benchmarks.dashboard_run import simulated_run
from benchmarks.emulated_rollouts import completed, emulated
from benchmarks.overhead import EmptyAgent
from benchmarks.tables import Column, print_measured_rows
from heddle_dask.cli.engine_option import chosen_model
from heddle_dask.cli.shared_options import COUNT, POSITIVE, shared_options
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.live.clusters.local import LocalRolloutCluster
from heddle_dask.live.driver.options import Budget
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.wire.cluster_messages import GetSnapshot
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.views.history.run_history import RunHistory

ARMS = ("not installed", "closed", "open", "top")
BASE = "not installed"
PAGE = "heddle"
# The document of a new tab takes the scheduler a few hundred milliseconds, once.
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class WatchedRow:
    """One arm: medians over the rounds.

    Attributes
    ----------
    ratio, ratio_range
        Steps per second over those of ``not installed`` in the same round.
    scheduler_us_per_step, scheduler_ratio
        CPU microseconds of the scheduler's process for each step, which other programs of the machine disturb less;
        and the median of its ratios.
    messages_per_s
        Messages that the tab received; 0 without a tab.
    """

    arm: str
    rounds: int
    steps_per_s: float
    ratio: float
    ratio_range: tuple[float, float]
    scheduler_us_per_step: float
    scheduler_ratio: float
    messages_per_s: float


@dataclass(slots=True)
class _Side:
    """One of the two clusters, with a session that stays open."""

    client: Client
    rollout: Rollout
    agent: EmptyAgent
    page: str
    scheduler: psutil.Process


@dataclass(slots=True)
class _Measured:
    """Figures of each round by arm."""

    rates: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    scheduler_us: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})
    messages: dict[str, list[float]] = field(default_factory=lambda: {arm: [] for arm in ARMS})


async def measure_watched(
    model: str | Path,
    *,
    trajectories: int = 200,
    rounds: int = 5,
    seconds: float = 4.0,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[WatchedRow]:
    """A row per arm."""
    measured = _Measured()
    order = random.Random(seed)
    sides = [_side(str(model), dashboard, EmptyAgent(seconds), seed) for dashboard in (False, True)]
    async with sides[0] as bare, sides[1] as shown:
        for side in (bare, shown):  # connections, imports and the first fits are made
            await _roll(side, trajectories)
        for number in range(rounds):
            for arm in order.sample(ARMS, len(ARMS)):
                on_progress(f"round {number + 1} of {rounds}: {arm}")
                async with _watching(arm, shown) as messages:
                    rate, scheduler_us, seconds = await _roll(bare if arm == BASE else shown, trajectories)
                measured.rates[arm].append(rate)
                measured.scheduler_us[arm].append(scheduler_us)
                measured.messages[arm].append(sum(messages) / seconds)
    return [_row(arm, measured) for arm in ARMS]


@contextlib.asynccontextmanager
async def _side(model: str, dashboard: bool, agent: EmptyAgent, seed: int) -> AsyncIterator[_Side]:
    spec = emulated(model, 0.0, seed=seed)
    async with (
        LocalRolloutCluster(engines=1, tool_cpus=1, dashboard=dashboard, asynchronous=True) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        budget = Budget(max_steps=1_000_000, max_context_tokens=65_536)
        rollout = Rollout(client, env=agent, model=model, engines=spec, budget=budget, seed=seed)
        async with rollout:
            port = client.scheduler_info()["services"]["dashboard"]
            pid: int = await client.run_on_scheduler(os.getpid)
            page = f"http://127.0.0.1:{port}/{PAGE}"
            yield _Side(client, rollout, agent, page, psutil.Process(pid))


async def _roll(side: _Side, trajectories: int) -> tuple[float, float, float]:
    """One rollout: steps per second, the scheduler's CPU microseconds per step, and its seconds."""
    side.agent.finished_s.clear()
    began_s, used_s = time.perf_counter(), _cpu_s(side.scheduler)
    batch = await side.rollout.run(trajectories)
    scheduler_us = 1e6 * (_cpu_s(side.scheduler) - used_s) / len(side.agent.finished_s)
    completed(batch)
    return side.agent.steps_per_s(), scheduler_us, time.perf_counter() - began_s


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


@contextlib.asynccontextmanager
async def _watching(arm: str, side: _Side) -> AsyncIterator[list[int]]:
    """Watch the cluster as the arm says; the list receives the number of messages that came."""
    messages: list[int] = []
    if arm == "open":
        tab = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.open_page",
            side.page,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert tab.stdout is not None
        await tab.stdout.readline()
        await asyncio.sleep(SETTLE_S)
        try:
            yield messages
        finally:
            said, _ = await tab.communicate(b"\n")
            messages.append(int(said.split()[0]))
    elif arm == "top":
        watching = asyncio.create_task(_ask_each_second(side))
        try:
            yield messages
        finally:
            watching.cancel()
    else:
        yield messages


async def _ask_each_second(side: _Side) -> None:
    metrics = side.page.removesuffix(PAGE) + "metrics"
    while True:
        await ask_scheduler(side.client, GetSnapshot())
        await asyncio.to_thread(lambda: urllib.request.urlopen(metrics, timeout=30).read())
        await asyncio.sleep(1.0)


def _row(arm: str, measured: _Measured) -> WatchedRow:
    rates, used_us = measured.rates[arm], measured.scheduler_us[arm]
    ratios = [rate / base for rate, base in zip(rates, measured.rates[BASE], strict=True)]
    used = [each / base for each, base in zip(used_us, measured.scheduler_us[BASE], strict=True)]
    return WatchedRow(
        arm=arm,
        rounds=len(rates),
        steps_per_s=round(median(rates), 1),
        ratio=round(median(ratios), 4),
        ratio_range=(round(min(ratios), 4), round(max(ratios), 4)),
        scheduler_us_per_step=round(median(used_us), 1),
        scheduler_ratio=round(median(used), 4),
        messages_per_s=round(median(measured.messages[arm]), 2),
    )


def history_us_per_event(trajectories: int = 1000, seed: int = 0, repeats: int = 5) -> float:
    """Microseconds that the history takes for an event with its commands, best of some folds of a simulated run."""
    pairs = simulated_run(trajectories, seed)
    best_s = float("inf")
    for _ in range(repeats):
        history = RunHistory()
        began_s = time.process_time()
        for event, commands in pairs:
            history.take(event, commands)
        best_s = min(best_s, time.process_time() - began_s)
    return round(1e6 * best_s / len(pairs), 3)


COLUMNS: Sequence[Column] = (
    ("arm", lambda row: row.arm),
    ("steps/s", lambda row: f"{row.steps_per_s:.0f}"),
    ("ratio", lambda row: f"{row.ratio:.3f} ({row.ratio_range[0]:.3f}-{row.ratio_range[1]:.3f})"),
    ("scheduler us/step", lambda row: f"{row.scheduler_us_per_step:.1f} ({row.scheduler_ratio:.3f})"),
    ("messages/s", lambda row: f"{row.messages_per_s:.1f}"),
)


@click.command("watched")
@click.option("--trajectories", default=200, show_default=True, type=COUNT, help="At once.")
@click.option("--rounds", default=5, show_default=True, type=COUNT, help="Of all arms; medians are shown.")
@click.option("--seconds", default=4.0, show_default=True, type=POSITIVE, help="Of one arm in a round.")
@click.option("--model", default=None, help="Directory with a tokenizer [default: the shipped tiny-agent].")
@shared_options
def watched(trajectories: int, rounds: int, seconds: float, model: str | None, as_json: bool, seed: int) -> None:
    """Steps per second with the dashboard open, closed and not installed, and beside heddle top."""
    collect_seldom()
    rows = uvloop.run(
        measure_watched(
            chosen_model(model, "emulated"),
            trajectories=trajectories,
            rounds=rounds,
            seconds=seconds,
            seed=seed,
            on_progress=lambda message: click.echo(message, err=True),
        )
    )
    history_us = history_us_per_event(seed=seed)
    click.echo(f"history: {history_us} us per event", err=as_json)
    print_measured_rows(rows, COLUMNS, as_json=as_json, history_us_per_event=history_us)
