"""Runs one rollout from the command line: cluster, `Rollout`, progress, signals, summary."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client
from rich.console import Console

from heddle_dask.cli.cluster_choice import (
    CONNECT_TIMEOUT_S,
    LocalShape,
    local_client,
    remote_client,
    workers_joined,
)
from heddle_dask.cli.degree_options import check_cost, check_degrees, parsed_cost, parsed_degrees
from heddle_dask.cli.engine_option import import_from_here
from heddle_dask.cli.interrupts import Interrupts
from heddle_dask.cli.model_choice import chosen_model, context_limit
from heddle_dask.cli.one_line import EXIT_TERMINATED
from heddle_dask.cli.out_path import check_out, default_out, remove_if_empty
from heddle_dask.cli.progress import Meter, Progress
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.cli.summary import Tally, table
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.kinds import engine_kind
from heddle_dask.environments.base import Environment
from heddle_dask.environments.loading import load_environment
from heddle_dask.live.capacity import Patience
from heddle_dask.live.degree_specs import DegreeSpecs
from heddle_dask.live.rollout import Rollout
from heddle_dask.live.rollout_inputs import engine_spec_of
from heddle_dask.live.run_writer import WriteMode
from heddle_dask.live.services import Budget, Sampling
from heddle_dask.live.warm_start import check_warm
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.strategies.presets import build_strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOrder:
    """The options of ``heddle rollout``, parsed; `given` names those from the command line itself."""

    env: str
    tasks: int
    samples: int
    model: str | None
    engine: str
    engines: int
    slots: int
    kv_transfer: bool
    degrees: str | None
    cost: str | None
    strategy: str
    overrides: tuple[str, ...]
    out: Path | None
    mode: WriteMode
    scheduler: str | None
    cluster: Path | None
    token_scale: float | None
    tool_scale: float | None
    max_steps: int
    max_step_tokens: int
    max_context_tokens: int | None
    temperature: float
    top_p: float
    tool_workers: int
    tool_cpus: int | None
    worker_timeout: float
    engine_timeout: float
    dashboard: bool | None
    seed: int
    given: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rollout came to: the JSON object and the exit code."""

    result: dict[str, Any]
    exit_code: int


def run_rollout(order: RolloutOrder, *, to_stderr: bool) -> Outcome:
    """Run it; prints progress on stderr and the table on stdout, or on stderr too.

    Raises
    ------
    BadInput
        Whatever of the order cannot be.
    """
    run = _Run(order, Progress(Console(stderr=True)))
    # Until the event loop watches signals nothing is running that would have to be ended in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    # What Dask says about connections and workers that end is known here.
    logging.getLogger("distributed").setLevel(logging.ERROR)
    collect_seldom()
    try:
        exit_code = asyncio.run(run.run())
    finally:
        if order.mode == "create":
            remove_if_empty(run.out)
    out = str(run.out) if run.out.exists() else None
    Console(stderr=to_stderr).print(table(run.tally, out), soft_wrap=True)
    return Outcome(run.tally.result(out), exit_code)


class _Run:
    """One rollout; its order is checked on construction, as far as that goes without starting anything."""

    def __init__(self, order: RolloutOrder, progress: Progress) -> None:
        self.order = order
        self.progress = progress
        self.tally = Tally(queued_inside=engine_kind(order.engine).prefill_includes_queue)
        self.out = order.out if order.out is not None else default_out(order.env, datetime.now())
        self.shape = LocalShape(order.engines, order.slots, order.tool_workers, order.tool_cpus)
        if order.cluster is not None:
            self.shape = self.shape.overlaid(order.cluster, order.given)
        predictor = build_strategies(order.strategy, seed=order.seed, overrides=order.overrides).predictor
        self.degrees = parsed_degrees(order.degrees)
        self.cost = parsed_cost(order.cost)
        check_out(self.out, order.mode)
        self.environment = _environment(order)
        self.model = chosen_model(order.model, order.engine)
        check_cost(self.cost, self.model, order.engine)
        self.budget = Budget(
            order.max_steps, order.max_step_tokens, context_limit(self.model, order.max_context_tokens)
        )
        self._check_degrees()
        # Elsewhere the scheduler reads it, which may see other files.
        if order.scheduler is None and predictor is not None and predictor.options.get("warm"):
            check_warm(str(predictor.options["warm"]))
        if order.scheduler is None:
            engine_kind(order.engine).check_installed()
        self.dashboard = _dashboard(order.dashboard)
        self.left = order.tasks * order.samples
        if order.mode == "resume":
            self._take_over()
        self._interrupts = Interrupts(self._stop)
        self._task: asyncio.Task[Any] | None = None
        self._rollout: Rollout | None = None

    def _check_degrees(self) -> None:
        order = self.order
        spec = engine_spec_of(
            order.engine, self.model, self.shape.slots, order.kv_transfer, self.budget, order.seed, self.cost
        )
        check_degrees(
            self.degrees,
            DegreeSpecs(spec, self.cost),
            self.shape.engines if order.scheduler is None else None,
        )

    def _take_over(self) -> None:
        """Count what a run that is resumed has already; refuse options that would not continue it."""
        before = StoredRun(self.out)
        mine = {
            "environment": self.environment.name,
            "seed": self.order.seed,
            "samples": self.order.samples,
        }
        for name, value in mine.items():
            was = before.metadata.get(name, value)
            if was != value:
                raise BadInput(f"--resume: {self.out} was made with {name} {was}, not {value}: give the same")
        for record in before:
            self.tally.add(record, timed=False)
        self.left = max(0, self.left - len(before))

    async def run(self) -> int:
        """Run to the end or to a signal; returns the exit code."""
        self._task = asyncio.current_task()
        self._interrupts.watch()
        try:
            async with self._client() as client:
                await self._roll_out(client)
        except asyncio.CancelledError:
            if not self._interrupts.exit_code:
                raise
        return self._interrupts.exit_code

    def _client(self) -> AbstractAsyncContextManager[Client]:
        if self.order.scheduler is not None:
            return remote_client(self.order.scheduler, CONNECT_TIMEOUT_S)
        self.progress.message(f"starting a local cluster for {self.shape.engines} engine(s)")
        return local_client(self.shape, self.dashboard)

    async def _roll_out(self, client: Client) -> None:
        # The template's imports block this loop for seconds; the workers of a local cluster start meanwhile.
        rollout = self._make(client)
        if self.order.scheduler is None:
            await workers_joined(client, self.shape)
        if self.dashboard:
            self.progress.message(f"dashboard: {client.dashboard_link}")
        async with rollout:
            self._rollout = rollout
            meter = Meter(self.left, self.tally, rollout.progress)
            async with self.progress.following(meter):
                async for record in rollout.stream(self.order.tasks):
                    self._count(record)
            if self._interrupts.exit_code == 0:
                self.progress.message("done; ending every process")

    def _make(self, client: Client) -> Rollout:
        order = self.order
        facts: dict[str, Any] = {"tasks": order.tasks, "command": sys.argv[1:]}
        if order.scheduler is None:
            facts |= {"slots": self.shape.slots * self.shape.engines, "tool_cpus": self.shape.all_tool_cpus}
        return Rollout(
            client,
            env=self.environment,
            model=self.model,
            engine=order.engine,
            engines=self.shape.engines if order.scheduler is None or "engines" in order.given else None,
            slots=self.shape.slots,
            kv_transfer=order.kv_transfer,
            degrees=self.degrees,
            cost=self.cost,
            strategy=order.strategy,
            overrides=order.overrides,
            samples=order.samples,
            seed=order.seed,
            out=self.out,
            mode=order.mode,
            budget=self.budget,
            sampling=Sampling(order.temperature, order.top_p),
            patience=Patience(order.worker_timeout, order.engine_timeout),
            metadata=facts,
            on_progress=self.progress.message,
        )

    def _count(self, record: TrajectoryRecord) -> None:
        self.tally.add(record)
        assert self._rollout is not None
        counts = self._rollout.progress()
        self.tally.slots = max(self.tally.slots, int(counts.get("slots", 0)))
        self.tally.tool_cpus = max(self.tally.tool_cpus, int(counts.get("tool_cpus", 0)))

    def _stop(self) -> None:
        """The first signal: abort what runs; before anything runs, break off the start."""
        self.progress.message("stopping; what is finished is kept. Once more: at once")
        if self._rollout is None or not self._rollout.interrupt():
            assert self._task is not None
            self._task.cancel()


def _environment(order: RolloutOrder) -> Environment:
    here = import_from_here()
    scales = {"token_scale": order.token_scale, "tool_scale": order.tool_scale}
    given = {name: value for name, value in scales.items() if value is not None}
    environment = load_environment(order.env, options=given)
    if order.scheduler is not None:
        _send_by_value(order.env.partition(":")[0], here)
    return environment


def _send_by_value(name: str, here: str) -> None:
    """Let tools of a module in this directory travel whole: workers of another cluster cannot import it."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if module is not None and path is not None and Path(path).parent.is_relative_to(here):
        cloudpickle.register_pickle_by_value(module)


def _dashboard(asked: bool | None) -> bool:
    installed = find_spec("bokeh") is not None
    if asked and not installed:
        raise BadInput("--dashboard needs bokeh: install it with `pip install 'heddle-dask[dashboard]'`")
    return installed if asked is None else asked
