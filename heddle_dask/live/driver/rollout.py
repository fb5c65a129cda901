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
from heddle_dask.live.driver.capacity import Patience, wait_for_capacity
from heddle_dask.live.driver.degree_specs import DegreeSpecs
from heddle_dask.live.driver.degrees import AskedDegrees, EngineDegrees, degrees_to_price
from heddle_dask.live.driver.open_session import OpenSession
from heddle_dask.live.driver.resume import unfinished
from heddle_dask.live.driver.rollout_inputs import Tasks, engine_spec_of, environment_of, tasks_of
from heddle_dask.live.driver.run_writer import RunWriter, WriteMode
from heddle_dask.live.driver.runner import Attempt, Driver, attempts_of
from heddle_dask.live.driver.services import Budget, Sampling, Services
from heddle_dask.live.wire.driver_messages import EngineLostNotice, Notice
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.strategies.presets import build_strategies, knows_lengths


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
    engine
        ``"vllm"``, ``"emulated"``, or a whole `EngineSpec`.
    engines
        How many engines must answer before the run starts; None: one on every worker tagged ``ENGINE``. With
        `tp_degrees`: how many workers that can host one must be there.
    slots, kv_transfer
        Of engines named by kind: most sequences at once, and whether they hand over KV caches to one another.
    tp_degrees
        GPUs of each engine. None: every worker hosts an engine as `engine` says. A list, such as ``[2, 1, 1]``: these,
        on the GPUs that the workers of each node share. ``"auto"``: before each batch, those under which it is expected
        to end earliest. `slots` applies to the TP degree in `engine` (default 1); other degrees scale from it.
        You may assign ``rollout.tp_degrees`` between runs, but only if it was given here; see ``docs/degrees.md``.
    cost
        What one engine is believed to cost (`cost.engine_cost.cost_from_mapping`), or that by degree
        (``{"1": …, "2": …}``); an emulated engine named by kind takes it, too. None: an emulated engine's own cost,
        else the profile that strategies name.
    strategy, overrides
        Preset, and ``part=name[,option=value]`` that replace parts of it.
    samples
        Attempts per task.
    out, mode
        Path of the Zarr store, or None to keep trajectories in memory only; ``"create"``, ``"append"``,
        ``"overwrite"`` or ``"resume"``.
    seed
        Of everything that is drawn: tasks, sampling, ties.
    retries
        How often a step or an action is tried again (`core.retries.RetryPolicy`).

    Raises
    ------
    BadInput
        At the first run: whatever of the above cannot be, in one line.

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
        engine: str | EngineSpec = "vllm",
        engines: int | None = None,
        slots: int = 8,
        kv_transfer: bool = False,
        tp_degrees: AskedDegrees = None,
        cost: Mapping[str, Any] | None = None,
        strategy: str = "sticky-least-loaded",
        overrides: Sequence[str] = (),
        samples: int = 1,
        seed: int = 0,
        out: str | Path | None = None,
        mode: WriteMode = "create",
        budget: Budget | None = None,
        sampling: Sampling | None = None,
        patience: Patience | None = None,
        retries: RetryPolicy | None = None,
        metadata: Mapping[str, Any] | None = None,
        on_progress: Callable[[str], None] = lambda message: None,
    ) -> None:
        if samples < 1:
            raise BadInput(f"samples is {samples}: use at least 1")
        if out is None and mode != "create":
            raise BadInput(f"mode '{mode}' needs a path: set out")
        self.client = client
        self.budget = budget or Budget()
        self.sampling = sampling or Sampling()
        self.environment = environment_of(env)
        self.template = ChatTemplate.load(str(model))
        self._check_template(on_progress)
        self.spec = engine_spec_of(engine, str(model), slots, kv_transfer, self.budget, seed, cost)
        self.model = str(model)
        self.samples = samples
        self.seed = seed
        self.out = None if out is None else Path(out)
        self._mode: WriteMode = mode
        self._strategy = strategy
        self._overrides = tuple(overrides)
        self.tp_degrees = tp_degrees
        specs = DegreeSpecs(self.spec, cost)
        self._cost = specs.described(degrees_to_price(tp_degrees))
        self._engines = engines
        self._patience = patience or Patience()
        self.retries = retries or RetryPolicy()
        self._metadata = dict(metadata or {})
        self._on_progress = on_progress
        self._engine_degrees = None if tp_degrees is None else self._degrees_of(specs)
        self._session: OpenSession | None = None
        self._writer: RunWriter | None = None
        self._lines_to: RunWriter | None = None
        self._early_lines: list[Any] = []
        self._driver: Driver | None = None
        self._moves: Mapping[str, Mapping[str, float]] = {}
        self._batches = 0
        self._batch_began_s = 0.0
        self._started_s = 0.0
        self._entered = False

    # -- public ------------------------------------------------------------------------------------

    def run(self, tasks: Tasks) -> Any:
        """Roll out `samples` attempts of each task and return a `Batch`.

        Parameters
        ----------
        tasks
            How many tasks to draw from the environment, or the tasks themselves; a string is a prompt.

        Raises
        ------
        BadInput, ControlPlaneFailed
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

    # -- how ---------------------------------------------------------------------------------------

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
        out = None if self.out is None else str(self.out)
        return Batch(records, makespan_s, out, counts, self._moves)

    async def _stream(self, tasks: Tasks) -> AsyncIterator[TrajectoryRecord]:
        chosen = tasks_of(tasks, self.environment, self.seed)
        try:
            session = self._session or await self._open()
            services = self._services(session)
            number = self._next_batch()
            prefix = f"b{number}/" if number else ""
            attempts = attempts_of(self.environment.name, chosen, self.samples, self.seed, prefix)
            if self._mode == "resume" and self._writer is not None:
                attempts = unfinished(attempts, self._writer)
            await self._provide_degrees(attempts)
            driver = Driver(self.client, services, self.environment, self._writer, session.channel.failed)
            self._driver = driver
            self._batch_began_s = services.clock()
            async for record in driver.run(attempts):
                if self._engine_degrees is not None:
                    self._engine_degrees.finished(record)
                yield record
            await session.channel.refresh()
            self._moves = session.channel.counts.get("moves", {})
            if self._writer is not None:
                await self._writer.store()
        finally:
            if not self._entered:
                await self._close()

    def _services(self, session: OpenSession) -> Services:
        writer = self._writer
        return Services(
            session=session.session_id,
            submitter=session.submitter,
            template=self.template,
            budget=self.budget,
            sampling=self.sampling,
            retries=self.retries,
            clock=lambda: time.monotonic() - self._started_s,
            journal=writer.journal if writer is not None else lambda kind, body: None,
        )

    async def _open(self) -> OpenSession:
        """Files first (they fail fastest), then session, plugins, engines; an older run is overwritten last."""
        self._started_s = time.monotonic()
        build_strategies(self._strategy, overrides=self._overrides, seed=self.seed)
        self._lines_to, self._early_lines = None, []
        if self._mode != "overwrite":
            self._open_writer()
        try:
            session = await self._stand_up()
            if self._mode == "overwrite":
                self._open_writer()
        except BaseException:
            if self._mode == "create" and self._writer is not None:
                self._writer.discard()  # nothing has begun: the same order, mended, may be given again
                self._writer = self._lines_to = None
            await self._close()
            raise
        return session

    def _open_writer(self) -> None:
        if self.out is not None:
            self._writer = RunWriter(self.out, self._mode, self._describe())
            self._writer.journal("session", self._describe())
            self._lines_to = self._writer
            if self._early_lines:
                self._keep_lines(self._early_lines)
                self._early_lines = []

    def _keep_lines(self, lines: list[Any]) -> None:
        """Lines of the control channel: to the journal once there is one, the last ones after `_close` began too."""
        if self._lines_to is not None:
            self._lines_to.journal("control", {"lines": lines})
        elif self.out is not None:
            self._early_lines += lines

    async def _stand_up(self) -> OpenSession:
        self._session = await OpenSession.claim(
            self.client,
            strategy=self._strategy,
            overrides=self._overrides,
            seed=self.seed,
            cost=self._cost,
            retries=self.retries,
            on_notice=self._on_notice,
            on_lines=self._keep_lines,
        )
        await self._session.provide_workers(self.spec, self._engine_degrees)
        if self._engine_degrees is None:
            await wait_for_capacity(self.client, self._engines, self._patience, self._on_progress)
        return self._session

    def _check_template(self, on_progress: Callable[[str], None]) -> None:
        """Say so when the template would rewrite history; the record keeps what was sampled all the same."""
        try:
            self.template.check_append_only()
        except BadInput as error:
            on_progress(f"note: {error}; trajectories keep their history as it was sampled")

    def _degrees_of(self, specs: DegreeSpecs) -> EngineDegrees:
        """What keeps the engines at the TP degrees asked for."""
        return EngineDegrees(
            self.client,
            specs,
            engines=self._engines,
            patience=self._patience,
            max_context_tokens=self.budget.max_context_tokens,
            seed=self.seed,
            told_apart=knows_lengths(self._strategy, self._overrides),
            note=self._on_progress,
        )

    async def _provide_degrees(self, attempts: Sequence[Attempt]) -> None:
        """Engines at the TP degrees asked for, before the first step of a batch."""
        if self._engine_degrees is None:
            if self.tp_degrees is not None:
                raise BadInput(
                    "tp_degrees were not given when this rollout opened: give them to `Rollout` itself"
                )
        elif attempts:
            await self._engine_degrees.provide(self.tp_degrees, attempts)

    def _next_batch(self) -> int:
        if self._writer is not None and self._mode != "resume":
            return self._writer.begin_batch()
        self._batches += 1
        return self._batches - 1

    def _describe(self) -> dict[str, Any]:
        return {
            "environment": self.environment.name,
            "model": self.model,
            "engine": self.spec.to_mapping(),
            "strategy": self._strategy,
            "overrides": list(self._overrides),
            "cost": self._cost,
            "retries": asdict(self.retries),
            "samples": self.samples,
            "seed": self.seed,
            "heddle_dask": version("heddle-dask"),
            "distributed": version("distributed"),
            "python": platform.python_version(),
            **self._metadata,
        }

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, EngineLostNotice):
            self._on_progress(f"engine {notice.engine_id} is lost: {notice.reason}")
        if self._driver is not None:
            self._driver.on_notice(notice)

    async def _close(self) -> None:
        session, self._session = self._session, None
        writer, self._writer = self._writer, None
        try:
            if session is not None:
                await session.close()
        finally:
            if writer is not None:
                await writer.close()


async def _next_or_none(stream: AsyncIterator[TrajectoryRecord]) -> TrajectoryRecord | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None
