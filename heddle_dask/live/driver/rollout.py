"""The public API: `Rollout`, from any `distributed.Client`, sync or async, in a script or a notebook."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Client

from heddle_dask.core.errors import BadInput
from heddle_dask.core.notebook import named_repr
from heddle_dask.core.run_description import WeightUpdatePolicy
from heddle_dask.engines.defaults import TINY_AGENT
from heddle_dask.engines.spec import EngineSpec
from heddle_dask.environments.base import Environment, Task
from heddle_dask.environments.function_tools import ToolTurns
from heddle_dask.environments.rewards import reward_identity
from heddle_dask.environments.task_sources import TaskSource
from heddle_dask.live.driver.batch import Batch, BatchTally, rollout_html, stream_sync
from heddle_dask.live.driver.connection.capacity import check_context, hardware_of, longest_context, wait_for_capacity
from heddle_dask.live.driver.connection.encryption import warn_if_unencrypted
from heddle_dask.live.driver.connection.sandbox_check import check_sandbox
from heddle_dask.live.driver.files.continuation import source_list, task_list
from heddle_dask.live.driver.files.resume import batch_prefix
from heddle_dask.live.driver.files.run_files import RunFiles, software_versions
from heddle_dask.live.driver.groups.group_feed import GroupFeed, GroupPort
from heddle_dask.live.driver.groups.group_stream import GroupStream
from heddle_dask.live.driver.inputs.loaded_model import LoadedModel
from heddle_dask.live.driver.inputs.meant_arguments import meant, shown
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.inputs.rollout_inputs import (
    ChatModel,
    Output,
    Prefixes,
    Tasks,
    check_replayed_calls,
    environment_of,
    given_or_default,
    prefixes_of,
    strategy_of,
    tasks_of,
)
from heddle_dask.live.driver.inputs.telemetry import SpanSender, Telemetry
from heddle_dask.live.driver.inputs.unknown_arguments import explained
from heddle_dask.live.driver.options import Budget, Engines, Sampling
from heddle_dask.live.driver.programs.attempts import attempts_of, domains_of
from heddle_dask.live.driver.programs.branch import Services
from heddle_dask.live.driver.programs.sandbox_roots import SandboxRoots
from heddle_dask.live.driver.runs.loop_watch import LoopWatch
from heddle_dask.live.driver.runs.runner import AttemptFeed, Driver, ListFeed, notice_line, progress_of
from heddle_dask.live.driver.runs.shown_progress import ShownProgress
from heddle_dask.live.driver.session.open_session import OpenSession
from heddle_dask.live.driver.session.rollout_engines import RolloutEngines
from heddle_dask.live.wire.driver_messages import GetCapacity, Notice, StartSession
from heddle_dask.live.wire.transport import ask_scheduler
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.strategies.affinity.hardware_map import check_classes, check_domains
from heddle_dask.strategies.presets import PARTS, Strategy
from heddle_dask.training.groups import FinishedGroup, GroupPlan

FeedOf = Callable[[Driver], AttemptFeed]


class Rollout:
    """Rolls agents out on a Dask cluster with LLM engines.

    Parameters
    ----------
    client
        Any `distributed.Client`. With an asynchronous one, `run` and `close` are awaited and `stream` is an async
        iterator.
    env
        Name (``"math"``), ``"replay:TRACE"``, ``"package.module:function"``, an `Environment`, or a coroutine
        function ``solve(task, ctx)``. With `tools` also a plain function ``score(task, answer)``: the agent is then
        `ToolAgent`.
    model
        Model directory; its chat template renders the prompts. Or a `ChatModel`, with variables of the template;
        ``"tiny-agent"`` is the model that comes with the package.
    tools
        Functions with type hints, or JSON schemas, of which the model is told in every trajectory
        (`Context.set_template`), and which ``ctx.run_tools(reply)`` runs.
    engines
        The kind of the engines, an `EngineSpec`, or `Engines` with count, slots, TP degrees, cost. None: `Engines()`.
    strategy
        Name of a preset, or a `Strategy` with parts of it replaced. None: the setting ``heddle.strategy``, else
        ``"sticky-forecast"``.
    samples
        Attempts per task.
    seed
        Of everything that is drawn: tasks, sampling, ties.
    out
        Path of a new Zarr store, an `Output` with path, mode, metadata and telemetry, or None to keep trajectories in
        memory only.
    budget
        Limits of each trajectory in steps, tokens and retries, and the sandbox of its tools.
    sampling
        Temperature, top-p, top-k and min-p.
    pools
        Model services, and quotas of APIs, that programs may name in `Needs`.
    progress
        Whether stderr shows a line for each thing that is waited for or decided, and how far a batch is: a bar on a
        terminal or in a notebook, else a line every few seconds. Or a function that takes these lines instead, such as
        ``print``.

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

    _driver: Driver | None = None
    _session: OpenSession | None = None
    _files: RunFiles | None = None
    _spans: SpanSender | None = None
    _longest: int | None = None
    _batches = 0
    _batch_began_s = _started_s = 0.0
    _batch_rows = range(0)
    _entered = False

    @explained
    def __init__(
        self,
        client: Client,
        *,
        env: str | Environment | Callable[..., Any],
        model: str | Path | ChatModel = TINY_AGENT,
        tools: Sequence[Any] = (),
        engines: str | EngineSpec | Engines | None = None,
        strategy: str | Strategy | None = None,
        samples: int = 1,
        seed: int = 0,
        out: str | Path | Output | None = None,
        budget: Budget | None = None,
        sampling: Sampling | None = None,
        pools: Pools | None = None,
        progress: bool | Callable[[str], None] = True,
    ) -> None:
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise BadInput(f"samples is {samples!r}: use a whole number of at least 1")
        self.client = client
        self._shown = ShownProgress(progress)
        self._on_progress = self._shown.note
        self.budget = given_or_default("budget", Budget, budget)
        self.sampling = given_or_default("sampling", Sampling, sampling)
        self.pools = given_or_default("pools", Pools, pools)
        if meant(engines) and not isinstance(engines, EngineSpec | Engines):
            raise BadInput(f"engines is {shown(engines)}: use a kind, an EngineSpec or Engines(…){meant(engines)}")
        asked = Engines.of(engines)
        self._patience = asked.patience
        self._strategy = strategy_of(strategy)
        self._output = Output.of(out)
        told = None if self._output is None else self._output.telemetry
        self._telemetry = given_or_default("telemetry", Telemetry, told)
        self._sandbox: Mapping[str, str] = {}
        self.environment = environment_of(env, tools)
        self._tools = tools
        self._model = LoadedModel.load(ChatModel.of(model), self._on_progress)
        self.model = self._model.path
        self.chat_template_kwargs = self._model.chat_template_kwargs
        self.template = self._model.template
        if tools:
            self.template.with_variables({"tools": ToolTurns().given(tools)})
        self.spec = asked.spec_for(self.model, self.budget.max_context_tokens, seed)
        check_context(self.budget.max_context_tokens, self.spec.max_model_len)
        self.samples = samples
        self.seed = seed
        self.tp_degrees = asked.tp_degrees
        self._engines = RolloutEngines(
            client,
            asked,
            self.spec,
            model=self.model,
            max_context_tokens=self.budget.max_context_tokens,
            seed=seed,
            told_apart=self._strategy.knows_lengths,
            note=self._on_progress,
        )
        self._moves: Mapping[str, Mapping[str, float]] = {}
        self._task_list: Mapping[str, Any] = {}

    def run(self, tasks: Tasks, *, prefixes: Prefixes | None = None) -> Any:
        """Roll out `samples` attempts of each task and return a `Batch`.

        With `out`, the trajectories of the batch are read from the store when they are asked for.

        Parameters
        ----------
        tasks
            How many tasks to draw from the environment, or the tasks themselves; a string is a prompt.
        prefixes
            By task id, what its attempts go on from: the first steps of an earlier attempt. They are replayed and
            masked; an attempt in which they differ fails with the cause ``"prefix"``.

        Raises
        ------
        BadInput, WriteFailed
        ClusterLost
            In one line: the cluster cannot go on. What has finished is stored, and the run can be resumed.
        ControlPlaneFailed
            A bug: the scheduler plugin raised.
        """
        return self._sync(self._run, tasks, prefixes)

    def stream(self, tasks: Tasks, *, prefixes: Prefixes | None = None) -> Any:
        """Yield each trajectory as it finishes; an async iterator with an asynchronous client."""
        if self.client.asynchronous:
            return self._stream(tasks, prefixes)
        return stream_sync(self._sync, self._stream(tasks, prefixes))

    def stream_groups(
        self,
        source: TaskSource,
        plan: GroupPlan,
        *,
        counts: Callable[[FinishedGroup], bool] = lambda group: True,
        counted: int | None = None,
    ) -> Any:
        """Yield finished groups of a source of tasks, which may be endless; tasks are taken as there is room for them.

        `samples` of the rollout is not used: the plan says how many attempts a group has.

        Parameters
        ----------
        counts
            Whether a finished group counts for its batch: one that does not is replaced. Asked once for each group, as
            soon as enough of its members have ended.
        counted
            Groups that counted before; None: as the journal of a resumed run says, else 0.

        Returns
        -------
        GroupStream
            With an asynchronous client; else an iterator of groups.

        Raises
        ------
        BadInput
            An environment rewards whole groups, and the plan keeps late members; or it samples prefixes, and engines
            read the calls of tools.
        """
        if plan.prefixes is not None:
            check_replayed_calls(self.spec.options)
        stream = GroupStream(
            GroupFeed(source, plan, self.seed, counts, counted),
            partial(self._roll_groups_out, source),
            partial(self.interrupt, to_resume=True),
        )
        return stream if self.client.asynchronous else stream_sync(self._sync, stream)

    def interrupt(self, to_resume: bool = False) -> bool:
        """Stop admitting and abort what runs; the run then ends, and nothing finished is lost.

        Parameters
        ----------
        to_resume
            Aborted trajectories are not stored: a resumed run goes on with them.

        Returns
        -------
        bool
            False before the first trajectory was admitted: then there is nothing to stop.
        """
        if self._driver is None or self.client.loop is None:
            return False
        self.client.loop.add_callback(self._driver.interrupt, to_resume)
        return True

    def progress(self) -> Mapping[str, Any]:
        """Counts of the running batch: by state, tokens generated, trajectories finished and not."""
        counts = dict(self._session.channel.counts) if self._session is not None else {}
        return {**counts, **progress_of(self._driver)}

    @property
    def session_id(self) -> str | None:
        """Id of the open session, as the scheduler knows this rollout; None before it is open."""
        return None if self._session is None else self._session.session_id

    @property
    def running_tp_degrees(self) -> tuple[int, ...]:
        """TP degrees of the engines that run, from the largest to the smallest; empty where none were asked for."""
        return self._engines.running_tp_degrees

    def __repr__(self) -> str:
        facts = self._describe()
        shown = {name: facts[name] for name in ("environment", "strategy", "samples")}
        counts = {name: count for name, count in self.progress().items() if name in ("finished", "unfinished")}
        out = None if self._output is None else str(self._output.path)
        return named_repr("Rollout", {**shown, "model": Path(self.model).name, "out": out, **counts})

    def _repr_html_(self) -> str:
        out = self._output and self._output.path
        return rollout_html({**self._describe(), **self.progress(), "out": out})

    def open(self, tasks: Sequence[Task]) -> Any:
        """Open the session now, with the engines for a run of these tasks; until `close`."""
        self._entered = True
        return self._sync(self._open_for, tasks)

    def close(self) -> Any:
        """End the session, stop the engines, close the store."""
        return self._sync(self._close)

    def __enter__(self) -> Rollout:
        self._entered = True
        return self

    def __exit__(self, *exc_info: object) -> None:
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

    async def _run(self, tasks: Tasks, prefixes: Prefixes | None = None) -> Batch:
        tally, began_s = BatchTally(), 0.0
        async for record in self._stream(tasks, prefixes):
            assert self._driver is not None
            tally.add(record, is_stored=self._driver.stores(record))
            began_s = self._batch_began_s
        out = None if self._output is None else str(self._output.path)
        return tally.batch(out, self._batch_rows, began_s, self._moves)

    async def _stream(self, tasks: Tasks, prefixes: Prefixes | None = None) -> AsyncIterator[TrajectoryRecord]:
        chosen = tasks_of(tasks, self.environment, self.seed)
        check_domains(self._strategy.build(seed=self.seed), domains_of(self.environment, chosen))
        behind = prefixes_of(prefixes, self.environment, chosen)
        if behind:
            check_replayed_calls(self.spec.options)
        self._task_list = task_list(chosen, behind)

        async def begin(session: OpenSession, files: RunFiles) -> FeedOf:
            prefix = batch_prefix(self._next_batch(files))
            drawn = [
                attempt.behind(behind.get(attempt.task.task_id))
                for attempt in attempts_of(self.environment, chosen, self.samples, self.seed, prefix)
            ]
            attempts = files.unfinished(drawn)
            self._shown.expect(len(attempts))
            await session.channel.unless_failed(self._engines.provide(self.tp_degrees, attempts))
            return lambda driver: ListFeed(attempts)

        async for record in self._roll_out((self.environment,), begin):
            yield record

    async def _roll_groups_out(self, source: TaskSource, feed: GroupFeed, on_finished: Callable[[], None]) -> None:
        names = {name for environment in source.environments for name in domains_of(environment, ())}
        check_domains(self._strategy.build(seed=self.seed), names, all_known=False)
        self._task_list = source_list(source)

        async def begin(session: OpenSession, files: RunFiles) -> FeedOf:
            prefix = batch_prefix(self._next_batch(files))
            first = feed.first_attempts()
            await session.channel.unless_failed(self._engines.provide(self.tp_degrees, first))

            def connected(driver: Driver) -> AttemptFeed:
                feed.connect(GroupPort(self.client, session, driver, self._on_progress), files, prefix, on_finished)
                return feed

            return connected

        async for _ in self._roll_out(source.environments, begin, feed.plan):
            pass

    async def _roll_out(
        self,
        environments: Sequence[Environment],
        begin: Callable[[OpenSession, RunFiles], Awaitable[FeedOf]],
        plan: GroupPlan | None = None,
    ) -> AsyncIterator[TrajectoryRecord]:
        """The records of a feed's attempts; `begin` provides the engines when session and files are open."""
        try:
            session, files = await self._open(environments, plan)
            first_row = files.stored
            feed_of = await begin(session, files)
            services = await self._services(session, files)
            members = None if plan is None else plan.members
            driver = Driver(self.client, services, files.writer, session.channel, members, self._on_progress)
            self._driver = driver
            feed = feed_of(driver)
            self._batch_began_s = services.clock()
            limit = driver.limit_run(self._on_progress)
            try:
                async with self._shown.following(self.progress):
                    with LoopWatch(self._on_progress):
                        async for record in driver.run(feed):
                            self._engines.finished(record)
                            self._shown.ended(record)
                            if self._spans is not None and not driver.is_left_to_resume(record):
                                self._spans.finished(record)
                            yield record
            finally:
                limit.cancel()
            await session.channel.refresh()
            self._moves = session.channel.counts.get("moves", {})
            await files.store()
            self._batch_rows = range(first_row, files.stored)
        finally:
            if not self._entered:
                await self._close()

    async def _services(self, session: OpenSession, files: RunFiles) -> Services:
        """What the contexts share, once the engines have said how long a context may be."""
        capacity = await ask_scheduler(self.client, GetCapacity())
        if not capacity.engines and self._longest is None:
            # Those that had answered have gone since: the others start, or come again.
            again = wait_for_capacity(self.client, 1, self._patience, self._on_progress)
            capacity = await session.channel.unless_failed(again)
        engines = [ready.engine for ready in capacity.engines]
        longest = self._longest = longest_context(self.budget.max_context_tokens, engines, self._longest)
        if self._spans is None:
            self._spans = self._telemetry.sender(
                session.session_id, self.model, self.template.decode, self._clock, self._on_progress
            )
        hardware = hardware_of(engines)
        check_classes(self._strategy.build(seed=self.seed), hardware)
        facts = {"context_tokens": longest, "slots": sum(engine.slots for engine in engines)}
        files.engines_answer({**facts, "hardware": hardware} if hardware else facts)
        return Services(
            session=session.session_id,
            submitter=session.submitter,
            gateways=session.gateways,
            template=self.template,
            budget=self.budget,
            max_context_tokens=longest,
            sampling=self.sampling,
            retries=self.budget.retries,
            pools=self.pools,
            engine_reads_calls=self.spec.options.reads_calls,
            clock=self._clock,
            journal=files.journal,
            roots=SandboxRoots(files.journal),
            tools=self._tools,
            note_once=self._shown.note_once,
        )

    def _clock(self) -> float:
        return time.monotonic() - self._started_s

    async def _open_for(self, tasks: Sequence[Task]) -> None:
        session, _ = await self._open((self.environment,), None)
        attempts = attempts_of(self.environment, tasks, self.samples, self.seed, "")
        await session.channel.unless_failed(self._engines.provide(self.tp_degrees, attempts))

    async def _open(self, environments: Sequence[Environment], plan: GroupPlan | None) -> tuple[OpenSession, RunFiles]:
        """Sandbox and files first (they fail fastest), then session, engines; an older run is overwritten last."""
        if self._session is not None and self._files is not None:
            return self._session, self._files
        self.pools.check_rewards(environments)
        if self.client.scheduler is not None:
            warn_if_unencrypted(self.client.scheduler.address or "")
        policy, patience_s = self.budget.sandbox, self._patience.workers_s
        asked = check_sandbox(self.client, environments, policy, patience_s, self._on_progress)
        self._sandbox = await asked
        self._started_s = time.monotonic()
        self._files = files = RunFiles(self._output, self._describe, self._on_progress)
        try:
            if not files.replaces_a_run:
                files.open()
            session = await self._stand_up(files, plan)
            if files.replaces_a_run:
                files.open()
        except BaseException:
            files.discard_if_new()
            await self._close()
            raise
        return session, files

    async def _stand_up(self, files: RunFiles, plan: GroupPlan | None) -> OpenSession:
        request = StartSession(
            session=uuid.uuid4().hex[:8],
            client_id=self.client.id,
            strategy=self._strategy.preset,
            overrides=tuple(self._strategy.overrides),
            seed=self.seed,
            cost=self._engines.cost,
            retries=self.budget.retries,
            weight=self._strategy.weight,
            quotas=tuple(self.pools.quotas),
            services=self.pools.declared_services,
            staleness=None if plan is None else plan.staleness,
            weights=WeightUpdatePolicy() if plan is None else plan.weights,
            silence_s=self._patience.silence_s,
            name=self.environment.name if self._output is None else self._output.name,
            environment=self.environment.name,
        )
        self._session = await OpenSession.claim(
            self.client,
            request,
            on_notice=self._on_notice,
            on_lines=files.keep_lines,
            patience=self._patience,
        )
        if self.pools.hosted:
            await self._session.provide_service_hosts()
        await self._engines.start(self._session)
        return self._session

    def _next_batch(self, files: RunFiles) -> int:
        number = files.begin_batch()
        if number is None:
            number = self._batches
            self._batches += 1
        return number

    def _describe(self) -> dict[str, Any]:
        return {
            "environment": self.environment.name,
            **self._model.description(),
            "sampling": asdict(self.sampling),
            "limits": self.budget.replayed,
            **self._engines.description(),
            "strategy": self._strategy.preset,
            "overrides": list(self._strategy.overrides),
            "parts": list(PARTS),
            "retries": asdict(self.budget.retries),
            **self.pools.description(),
            **self._sandbox,
            "samples": self.samples,
            "seed": self.seed,
            "rewards": reward_identity(self.environment),
            "task_list": self._task_list,
            **software_versions(),
        }

    def _on_notice(self, notice: Notice) -> None:
        if line := notice_line(notice):
            self._on_progress(line)
        if self._driver is not None:
            self._driver.on_notice(notice)

    async def _close(self) -> None:
        session, self._session = self._session, None
        files, self._files = self._files, None
        spans, self._spans = self._spans, None
        try:
            if session is not None:
                await session.close()
        finally:
            if files is not None:
                await files.close()
            if spans is not None:
                await asyncio.to_thread(spans.close)
