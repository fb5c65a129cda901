"""The public API: `Rollout`, from any `distributed.Client`, sync or async, in a script or a notebook."""

from __future__ import annotations

import platform
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

from distributed import Client

from heddle_dask.chat.template import ChatTemplate
from heddle_dask.core.errors import BadInput
from heddle_dask.core.retries import RetryPolicy
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Environment
from heddle_dask.live.driver.batch import Batch
from heddle_dask.live.driver.capacity import wait_for_capacity
from heddle_dask.live.driver.continuation import tokenizer_digest
from heddle_dask.live.driver.degrees import EngineDegrees, degrees_to_price
from heddle_dask.live.driver.encryption import warn_if_unencrypted
from heddle_dask.live.driver.open_session import OpenSession
from heddle_dask.live.driver.resume import batch_prefix
from heddle_dask.live.driver.rollout_inputs import (
    Engines,
    Output,
    Tasks,
    environment_of,
    given_or_default,
    tasks_of,
)
from heddle_dask.live.driver.run_files import RunFiles
from heddle_dask.live.driver.runner import Attempt, Driver, attempts_of
from heddle_dask.live.driver.sandbox_check import check_sandbox, checked_policy
from heddle_dask.live.driver.services import Budget, Sampling, Services
from heddle_dask.live.driver.tp_degree_specs import TpDegreeSpecs
from heddle_dask.live.wire.driver_messages import EngineLostNotice, Notice
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.strategies.presets import Strategy


class Rollout:
    """Rolls agents out on a Dask cluster with LLM engines.

    Parameters
    ----------
    client
        Any `distributed.Client`. With an asynchronous one, `run` and `close` are awaited and `stream` is an async
        iterator.
    env
        Name (``"math"``), ``"replay:TRACE"``, ``"package.module:function"``, an `Environment`, or a coroutine
        function ``solve(task, ctx)``.
    model
        Model directory; its chat template renders the prompts.
    engines
        The kind of the engines, an `EngineSpec`, or `Engines` with count, slots, TP degrees, cost.
    strategy
        Name of a preset, or a `Strategy` with parts of it replaced.
    samples
        Attempts per task.
    seed
        Of everything that is drawn: tasks, sampling, ties.
    out
        Path of a new Zarr store, an `Output` with path, mode and metadata, or None to keep trajectories in memory only.
    budget
        Limits of each trajectory in steps and tokens, and the sandbox of its tools.
    sampling
        Temperature and top-p.
    retries
        How often a step or an action is tried again.
    on_progress
        Takes one line for each thing that is waited for or decided.

    Attributes
    ----------
    tp_degrees
        TP degrees of the next run, as in `Engines`. They may be assigned between runs, but only if `engines` gave some.

    Raises
    ------
    BadInput
        In one line: a value that is not allowed. What only the cluster shows is refused at the first run.

    Examples
    --------
    >>> rollout = Rollout(client, env="math", model="my-model", samples=8, out="runs/x.zarr")  # doctest: +SKIP
    >>> batch = rollout.run(64)  # doctest: +SKIP
    """

    def __init__(
        self,
        client: Client,
        *,
        env: str | Environment | Callable[..., Any],
        model: str | Path,
        engines: str | EngineSpec | Engines = "vllm",
        strategy: str | Strategy = "sticky-least-loaded",
        samples: int = 1,
        seed: int = 0,
        out: str | Path | Output | None = None,
        budget: Budget | None = None,
        sampling: Sampling | None = None,
        retries: RetryPolicy | None = None,
        on_progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise BadInput(f"samples is {samples!r}: use a whole number of at least 1")
        self.client = client
        self.budget = given_or_default("budget", Budget, budget)
        self.sampling = given_or_default("sampling", Sampling, sampling)
        self.retries = given_or_default("retries", RetryPolicy, retries)
        self._engines = Engines.of(engines)
        self._strategy = Strategy.of(strategy)
        self._output = Output.of(out)
        checked_policy(self.budget.sandbox)
        self._sandbox: Mapping[str, str] = {}
        self.environment = environment_of(env)
        self.template = ChatTemplate.load(str(model))
        self._check_template(on_progress)
        self.model = str(model)
        self.spec = self._engines.spec_for(self.model, self.budget.max_context_tokens, seed)
        self.samples = samples
        self.seed = seed
        self._on_progress = on_progress
        self.tp_degrees = self._engines.tp_degrees
        specs = TpDegreeSpecs(self.spec, self._engines.cost)
        self._cost = specs.described(degrees_to_price(self.tp_degrees))
        self._engine_degrees = None if self.tp_degrees is None else self._degrees_of(specs)
        self._session: OpenSession | None = None
        self._files: RunFiles | None = None
        self._driver: Driver | None = None
        self._moves: Mapping[str, Mapping[str, float]] = {}
        self._batches = 0
        self._batch_began_s = 0.0
        self._started_s = 0.0
        self._entered = False

    def run(self, tasks: Tasks) -> Any:
        """Roll out `samples` attempts of each task and return a `Batch`.

        Parameters
        ----------
        tasks
            How many tasks to draw from the environment, or the tasks themselves; a string is a prompt.

        Raises
        ------
        BadInput
        ClusterLost
            In one line: the cluster cannot go on. What has finished is stored, and the run can be resumed.
        ControlPlaneFailed
            A bug: the scheduler plugin raised.
        """
        return self._sync(self._run, tasks)

    def stream(self, tasks: Tasks) -> Any:
        """Yield each trajectory as it finishes; an async iterator with an asynchronous client."""
        if self.client.asynchronous:
            return self._stream(tasks)
        return self._stream_sync(tasks)

    def interrupt(self) -> bool:
        """Stop admitting and abort what runs; the run then ends, and nothing finished is lost.

        Returns
        -------
        bool
            False before the first trajectory was admitted: then there is nothing to stop.
        """
        if self._driver is None or self.client.loop is None:
            return False
        self.client.loop.add_callback(self._driver.interrupt)
        return True

    def progress(self) -> Mapping[str, Any]:
        """Counts of the running batch: by state, tokens generated, trajectories finished."""
        counts = dict(self._session.channel.counts) if self._session is not None else {}
        driver = self._driver
        return {
            **counts,
            "finished": driver.finished if driver is not None else 0,
            "tokens": driver.live_tokens if driver is not None else 0,
        }

    @property
    def running_tp_degrees(self) -> tuple[int, ...]:
        """TP degrees of the engines that run, from the largest to the smallest; empty where none were asked for."""
        return () if self._engine_degrees is None else self._engine_degrees.running

    def close(self) -> Any:
        """End the session, stop the engines, close the store."""
        return self._sync(self._close)

    def __enter__(self) -> Rollout:
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Rollout:
        self._entered = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    def _sync(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.client.asynchronous:
            return function(*args)
        try:
            return self.client.sync(function, *args)
        except KeyboardInterrupt:
            self.client.sync(self._interrupt_and_close)
            raise

    async def _interrupt_and_close(self) -> None:
        if self._driver is not None:
            self._driver.interrupt()
            await self._driver.ended.wait()
        await self._close()

    def _stream_sync(self, tasks: Tasks) -> Iterator[TrajectoryRecord]:
        stream = self._stream(tasks)
        while True:
            record = self._sync(_next_or_none, stream)
            if record is None:
                return
            yield record

    async def _run(self, tasks: Tasks) -> Batch:
        records: list[TrajectoryRecord] = []
        began_s = 0.0
        async for record in self._stream(tasks):
            records.append(record)
            began_s = self._batch_began_s
        counts: dict[str, int] = {}
        for record in records:
            counts[record.status] = counts.get(record.status, 0) + 1
        makespan_s = max((r.finished_s for r in records), default=0.0) - began_s
        out = None if self._output is None else str(self._output.path)
        return Batch(records, makespan_s, out, counts, self._moves)

    async def _stream(self, tasks: Tasks) -> AsyncIterator[TrajectoryRecord]:
        chosen = tasks_of(tasks, self.environment, self.seed)
        try:
            session, files = await self._open()
            services = self._services(session, files)
            number = self._next_batch(files)
            prefix = batch_prefix(number)
            attempts = files.unfinished(
                attempts_of(self.environment.name, chosen, self.samples, self.seed, prefix)
            )
            await session.channel.unless_failed(self._provide_degrees(attempts))
            driver = Driver(self.client, services, self.environment, files.writer, session.channel)
            self._driver = driver
            self._batch_began_s = services.clock()
            limit = driver.limit_run(self._on_progress)
            try:
                async for record in driver.run(attempts):
                    if self._engine_degrees is not None:
                        self._engine_degrees.finished(record)
                    yield record
            finally:
                limit.cancel()
            await session.channel.refresh()
            self._moves = session.channel.counts.get("moves", {})
            await files.store()
        finally:
            if not self._entered:
                await self._close()

    def _services(self, session: OpenSession, files: RunFiles) -> Services:
        return Services(
            session=session.session_id,
            submitter=session.submitter,
            template=self.template,
            budget=self.budget,
            sampling=self.sampling,
            retries=self.retries,
            clock=lambda: time.monotonic() - self._started_s,
            journal=files.journal,
        )

    async def _open(self) -> tuple[OpenSession, RunFiles]:
        """Sandbox and files first (they fail fastest), then session, engines; an older run is overwritten last."""
        if self._session is not None and self._files is not None:
            return self._session, self._files
        if self.client.scheduler is not None:
            warn_if_unencrypted(self.client.scheduler.address or "")
        policy, patience_s = self.budget.sandbox, self._engines.patience.workers_s
        asked = check_sandbox(self.client, self.environment, policy, patience_s, self._on_progress)
        self._sandbox = await asked
        self._started_s = time.monotonic()
        self._files = files = RunFiles(self._output, self._describe)
        try:
            if not files.replaces_a_run:
                files.open()
            session = await self._stand_up(files)
            if files.replaces_a_run:
                files.open()
        except BaseException:
            files.discard_if_new()
            await self._close()
            raise
        return session, files

    async def _stand_up(self, files: RunFiles) -> OpenSession:
        self._session = await OpenSession.claim(
            self.client,
            strategy=self._strategy.preset,
            overrides=self._strategy.overrides,
            seed=self.seed,
            cost=self._cost,
            retries=self.retries,
            on_notice=self._on_notice,
            on_lines=files.keep_lines,
            patience=self._engines.patience,
        )
        unless_failed = self._session.channel.unless_failed
        await unless_failed(self._session.provide_workers(self.spec, self._engine_degrees))
        if self._engine_degrees is None:
            count, patience = self._engines.count, self._engines.patience
            await unless_failed(wait_for_capacity(self.client, count, patience, self._on_progress))
        return self._session

    def _check_template(self, on_progress: Callable[[str], None]) -> None:
        """Say so when the template would rewrite history; the record keeps what was sampled all the same."""
        try:
            self.template.check_append_only()
        except BadInput as error:
            on_progress(f"note: {error}; trajectories keep their history as it was sampled")

    def _degrees_of(self, specs: TpDegreeSpecs) -> EngineDegrees:
        """What keeps the engines at the TP degrees asked for."""
        return EngineDegrees(
            self.client,
            specs,
            engines=self._engines.count,
            patience=self._engines.patience,
            max_context_tokens=self.budget.max_context_tokens,
            seed=self.seed,
            told_apart=self._strategy.knows_lengths,
            note=self._on_progress,
        )

    async def _provide_degrees(self, attempts: Sequence[Attempt]) -> None:
        """Engines at the TP degrees asked for, before the first step of a batch."""
        if self._engine_degrees is None:
            if self.tp_degrees is not None:
                raise BadInput("tp_degrees were not given when this rollout opened: give them to `Engines`")
        elif attempts:
            await self._engine_degrees.provide(self.tp_degrees, attempts)

    def _next_batch(self, files: RunFiles) -> int:
        number = files.begin_batch()
        if number is None:
            number = self._batches
            self._batches += 1
        return number

    def _describe(self) -> dict[str, Any]:
        return {
            "environment": self.environment.name,
            "model": self.model,
            "tokenizer": tokenizer_digest(self.model),
            "sampling": asdict(self.sampling),
            "limits": self.budget.replayed,
            "engine": self.spec.to_mapping(),
            "strategy": self._strategy.preset,
            "overrides": list(self._strategy.overrides),
            "cost": self._cost,
            "retries": asdict(self.retries),
            **self._sandbox,
            "samples": self.samples,
            "seed": self.seed,
            "heddle_dask": version("heddle-dask"),
            "distributed": version("distributed"),
            "python": platform.python_version(),
        }

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, EngineLostNotice):
            self._on_progress(f"engine {notice.engine_id} is lost: {notice.reason}")
        if self._driver is not None:
            self._driver.on_notice(notice)

    async def _close(self) -> None:
        session, self._session = self._session, None
        files, self._files = self._files, None
        try:
            if session is not None:
                await session.close()
        finally:
            if files is not None:
                await files.close()


async def _next_or_none(stream: AsyncIterator[TrajectoryRecord]) -> TrajectoryRecord | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None
