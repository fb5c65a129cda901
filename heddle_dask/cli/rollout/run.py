"""Runs one rollout from the command line: cluster, `Rollout`, progress, signals, summary."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
from distributed import Client
from rich.console import Console
from rich.text import Text

from heddle_dask.apis.rewarded import rewarded
from heddle_dask.cli.cluster_choice import (
    CONNECT_TIMEOUT_S,
    TlsFiles,
    local_client,
    remote_client,
    workers_joined,
)
from heddle_dask.cli.engine_option import import_from_here, parsed_vllm_options
from heddle_dask.cli.group_cluster import check_plan, engines_of_groups, groups_client, plan_of_file
from heddle_dask.cli.model_choice import chosen_model
from heddle_dask.cli.one_line import EXIT_FAILED, EXIT_TERMINATED, EXIT_TO_RESUME, one_line
from heddle_dask.cli.rollout.engine_options import (
    check_cost,
    check_gpus,
    parsed_cost,
    parsed_degrees,
    parsed_template_kwargs,
)
from heddle_dask.cli.rollout.hardware import domains_of, local_shape, with_affinity
from heddle_dask.cli.rollout.interrupts import Interrupts
from heddle_dask.cli.rollout.order import RolloutOrder
from heddle_dask.cli.rollout.out_path import check_out, default_out, remove_if_empty
from heddle_dask.cli.rollout.progress import Meter, ProgressDisplay
from heddle_dask.cli.rollout.run_logs import RunLogs
from heddle_dask.cli.rollout.summary import Tally, table
from heddle_dask.cli.stored_run import StoredRun
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.gpus import usable_gpus
from heddle_dask.engines.spec import engine_kind
from heddle_dask.environments.base import Environment
from heddle_dask.environments.loading import load_environment
from heddle_dask.environments.mix import mix_of, mixed_environment
from heddle_dask.live.clusters.connection_file import connection_file
from heddle_dask.live.clusters.quota_table import quotas_of_file
from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan
from heddle_dask.live.driver.connection.capacity import Patience
from heddle_dask.live.driver.connection.control_channel import ClusterLost
from heddle_dask.live.driver.connection.encryption import UnencryptedConnection
from heddle_dask.live.driver.files.continuation import check_continues, task_list, tokenizer_digest
from heddle_dask.live.driver.files.resume import batch_of
from heddle_dask.live.driver.files.run_files import software_versions
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.inputs.rollout_inputs import ChatModel, Engines, Output, tasks_of
from heddle_dask.live.driver.inputs.telemetry import Telemetry
from heddle_dask.live.driver.programs.services import Budget, Sampling
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.session.tp_degree_specs import TpDegreeSpecs
from heddle_dask.live.scheduler.warm_start import check_warm
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.strategies.affinity.hardware_map import check_affinity

_LOST = re.compile(r"engine \S+ is lost: ")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a rollout: the JSON object and the exit code."""

    result: dict[str, Any]
    exit_code: int


def run_rollout(order: RolloutOrder, *, to_stderr: bool) -> Outcome:
    """Run it; prints progress on stderr and the table on stdout, or on stderr too.

    Raises
    ------
    BadInput
        An option that cannot be met; the message says which.
    """
    run = RolloutRun(order, ProgressDisplay(Console(stderr=True)))
    prepare_process()
    try:
        exit_code = asyncio.run(run.run())
    finally:
        if order.mode == "create":
            remove_if_empty(run.out)
    out = str(run.out) if run.out.exists() else None
    Console(stderr=to_stderr).print(table(run.tally, out), soft_wrap=True)
    if run.lost:
        one_line(f"{run.lost}{run.logs.tail('scheduler')}; {run.left_to_do(out)}")
    failure = run.tally.failure or ""
    if failure and exit_code == 0:
        Console(stderr=True).print(Text(f"heddle: {failure}"), soft_wrap=True)
        exit_code = EXIT_FAILED
    return Outcome(run.tally.result(out), exit_code)


def prepare_process() -> None:
    """Signals, logging and collection of a process that drives a cluster."""
    # Before the event loop watches signals, nothing runs that needs an orderly end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(EXIT_TO_RESUME))
    # Dask reports every connection and worker that ends; this process ends them on purpose.
    logging.getLogger("distributed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", UnencryptedConnection)  # the command line says it in one line
    collect_seldom()


class RolloutRun:
    """One rollout. The constructor checks every option that can be checked without starting a process."""

    def __init__(self, order: RolloutOrder, progress: ProgressDisplay) -> None:
        self.order = order
        self.progress = progress
        fleet, where = order.fleet, order.where
        kind = engine_kind(fleet.engine)
        self.tally = Tally(queued_inside=kind.prefill_includes_queue)
        self.out = order.out if order.out is not None else default_out(order.work.env, datetime.now())
        self.shape = local_shape(order)
        self.plan = plan_of_file(where.cluster)
        if where.cluster is not None and self.plan is not None:
            check_plan(self.plan, where.cluster, order.given)
        elif where.cluster is not None:
            self.shape = self.shape.overlaid(where.cluster, order.given)
        self.strategy = with_affinity(order.strategy, where.cluster)
        self.pools = Pools(quotas=quotas_of_file(where.cluster))
        self.is_local = where.scheduler is None and self.plan is None
        predictor = order.strategy.build(seed=order.seed).predictor
        self.engines = self._engines()
        asked = order.limits
        self.sampling = Sampling(
            asked.temperature, asked.top_p, asked.top_k, asked.min_p, seeded=asked.seeded_sampling
        )
        self.chat_template_kwargs = parsed_template_kwargs(order.work.chat_template_kwargs)
        check_out(self.out, order.mode)
        self.logs = RunLogs(self.out, order.mode)
        self.environment = _environment(order, by_value=not self.is_local)
        self.tasks = tasks_of(order.work.tasks, self.environment, order.seed)
        self.tally.mix.update(mix_of(self.environment, self.tasks, order.work.samples))
        self.model = chosen_model(order.fleet.model, order.fleet.engine)
        check_cost(self.engines.cost, self.model, order.fleet.engine)
        limits = order.limits
        self.budget = Budget(
            max_steps=limits.max_steps,
            max_step_tokens=limits.max_step_tokens,
            max_context_tokens=limits.max_context_tokens,
            max_trajectory_s=limits.trajectory_timeout,
            tool_timeout_s=limits.tool_timeout,
            max_run_s=limits.run_timeout,
            sandbox=where.sandbox,
            retries=order.retries,
        )
        if self.shape.hardware is not None or self.plan is not None:
            check_affinity(
                self.strategy.build(seed=order.seed),
                self._hardware(),
                domains_of(self.environment, self.tasks),
            )
        if self.plan is not None:
            self.engines = engines_of_groups(
                self.engines, self.plan, self.model, limits.max_context_tokens, order.seed
            )
        self._check_degrees()
        if self.is_local and self.engines.tp_degrees is None and kind.uses_gpus():
            check_gpus(self.shape.engines, usable_gpus(os.environ))
        # With --scheduler the scheduler reads this file, possibly from another file system.
        if order.where.scheduler is None and predictor is not None and predictor.options.get("warm"):
            check_warm(str(predictor.options["warm"]))
        if self.is_local:
            kind.check_installed()
        self.dashboard = _dashboard(where.dashboard)
        self.telemetry = Telemetry(endpoint=where.otel)
        self.left = order.work.tasks * order.work.samples
        self.is_finished = False
        if order.mode in ("append", "resume"):
            self._take_over(resumes=order.mode == "resume")
        self.lost = ""
        self._interrupts = Interrupts(self._stop)
        self._task: asyncio.Task[Any] | None = None
        self._rollout: Rollout | None = None

    def _hardware(self) -> Collection[str]:
        """Classes of the engines that this run starts."""
        if self.plan is not None:
            return [group.hardware for group in self.plan.groups.values()]
        return self.shape.hardware or ()

    def _engines(self) -> Engines:
        fleet, where = self.order.fleet, self.order.where
        return Engines(
            kind=fleet.engine,
            count=self._engines_awaited(),
            slots=self.shape.slots,
            kv_transfer=fleet.kv_transfer,
            tp_degrees=parsed_degrees(fleet.tp_degrees),
            cost=parsed_cost(fleet.cost),
            dtype=fleet.dtype,
            options=parsed_vllm_options(
                fleet.engine,
                fleet.gpu_memory_utilization,
                fleet.quantization,
                fleet.logprobs,
                fleet.engine_args,
            ),
            patience=Patience(
                workers_s=where.worker_timeout,
                engines_s=self._engine_timeout_s(),
                rejoin_s=where.rejoin_timeout,
                scheduler_s=where.scheduler_timeout,
                orphans_s=where.orphan_timeout,
            ),
        )

    def _engines_awaited(self) -> int | None:
        """Engines that must answer before the run starts; None: as many as the cluster says, or has workers for."""
        by_default = self.order.where.scheduler and "engines" in self.order.by_default
        return None if self.plan is not None or by_default else self.shape.engines

    def _engine_timeout_s(self) -> float:
        """Longest start of an engine: as the option says, else as the groups do."""
        given_s = self.order.where.engine_timeout
        if self.plan is None or "engine_timeout" not in self.order.by_default:
            return given_s
        return max(group.start_timeout_s for group in self.plan.groups.values() if group.role == "rollout")

    def _check_degrees(self) -> None:
        """Refuse, before anything starts, engines that this model or this machine cannot have."""
        tp_degrees = self.engines.tp_degrees
        if tp_degrees is None:
            return
        needed = 0 if tp_degrees == "auto" else sum(tp_degrees)
        workers = self.shape.engines
        if self.order.where.scheduler is None and needed > workers:
            raise BadInput(
                f"--tp {self.order.fleet.tp_degrees} need {needed} workers, and --engines {workers} says how many "
                f"there are: use --engines {needed}"
            )
        spec = self.engines.spec_for(self.model, self.budget.max_context_tokens, self.order.seed)
        TpDegreeSpecs(spec, self.engines.cost).check(tp_degrees)

    def _take_over(self, *, resumes: bool) -> None:
        """Refuse, before a cluster starts, what would not continue the run; count what is there of a resumed one."""
        before = StoredRun(self.out)
        spec = self.engines.spec_for(self.model, self.budget.max_context_tokens, self.order.seed)
        mine = {
            "environment": self.environment.name,
            "model": self.model,
            "tokenizer": tokenizer_digest(self.model),
            "engine": spec.to_mapping(),
            "logprobs": spec.options.logprobs,
            "sampling": asdict(self.sampling),
            "limits": self.budget.replayed,
            "chat_template_kwargs": self.chat_template_kwargs,
            "seed": self.order.seed,
            "samples": self.order.work.samples,
            "task_list": task_list(self.tasks),
            **software_versions(),
        }
        check_continues(self.out, before.metadata, mine, resumes=resumes)
        if not resumes:
            return
        for record in before.outlines():
            self.tally.add(record, timed=False)
        last = int(before.metadata.get("batches", 1)) - 1
        stored = sum(batch_of(trajectory_id) == last for trajectory_id in before.ids)
        self.left = max(0, self.left - stored)
        self.is_finished = self.left == 0 and not before.recovered

    async def run(self) -> int:
        """Run to the end or to a signal; returns the exit code."""
        if self.is_finished:  # the last jobs of a chain ask for no GPUs
            self.progress.message(f"every trajectory of {self.out} has ended: nothing is left to do")
            return 0
        self._task = asyncio.current_task()
        self._interrupts.watch()
        try:
            async with self._client() as client:
                try:
                    await self._roll_out(client)
                except ClusterLost as error:
                    self.lost = str(error)
                    # The client is closed while it tries to connect again, and would log that with a traceback. Its
                    # logger has a level of its own, from Dask's configuration.
                    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        except asyncio.CancelledError:
            if not self._interrupts.exit_code:
                raise
        return self._interrupts.exit_code or (EXIT_FAILED if self.lost else 0)

    def left_to_do(self, out: str | None) -> str:
        """How to get the rest of a run that ended with its cluster."""
        if out is None:
            return "no trajectory has begun: give the same command again"
        return f"what has finished is stored: give the same command with --out {out} --resume"

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        where = self.order.where
        if where.scheduler is not None:
            tls = TlsFiles(where.tls_ca_file, where.tls_cert, where.tls_key)
            async with remote_client(where.scheduler, CONNECT_TIMEOUT_S, tls) as client:
                yield client
            return
        async with self.logs.kept() as logs:
            if self.plan is not None:
                self.progress.message(
                    f"starting a cluster of {_groups_text(self.plan)}; logs: {self.plan.logs or logs}"
                )
                async with groups_client(self.plan, self.plan.logs or logs, self.progress.message) as client:
                    with connection_file(logs, client.cluster):
                        yield client
                return
            self.progress.message(
                f"starting a local cluster for {self.shape.engines} engine(s); logs: {logs}"
            )
            async with local_client(self.shape, self.dashboard, logs) as client:
                with connection_file(logs, client.cluster):
                    yield client

    async def _roll_out(self, client: Client) -> None:
        # The template's imports block this loop for seconds; the workers of a local cluster start meanwhile.
        rollout = self._make(client)
        if self.is_local:
            await workers_joined(client, self.shape)
        if self.order.where.scheduler is None:
            self.progress.message(f"watch it with: heddle top {shlex.quote(str(self.out))}")
        if self.dashboard:
            self.progress.message(f"dashboard: {client.dashboard_link.removesuffix('/status')}/heddle")
        async with rollout:
            self._rollout = rollout
            meter = Meter(self.left, self.tally, rollout.progress)
            try:
                async with self.progress.following(meter):
                    async for record in rollout.stream(self.tasks):
                        self._count(record)
            finally:
                self.tally.lost = rollout.progress()["unfinished"]
            if self._interrupts.exit_code == 0:
                self.progress.message("done; ending every process")

    def _make(self, client: Client) -> Rollout:
        order = self.order
        facts: dict[str, Any] = {"tasks": order.work.tasks, "command": sys.argv[1:]}
        if self.is_local:
            facts["tool_cpus"] = self.shape.all_tool_cpus
        return Rollout(
            client,
            env=self.environment,
            model=ChatModel(self.model, self.chat_template_kwargs),
            engines=self.engines,
            strategy=self.strategy,
            samples=order.work.samples,
            seed=order.seed,
            out=Output(self.out, order.mode, facts, self.telemetry),
            budget=self.budget,
            pools=self.pools,
            sampling=self.sampling,
            on_progress=self._told,
        )

    def _told(self, message: str) -> None:
        """Print a line of the rollout; one about a lost engine names the logs."""
        about_logs = f" (logs: {self.logs.path})" if _LOST.match(message) and self.logs.path.exists() else ""
        self.progress.message(f"{message}{about_logs}")

    def _count(self, record: TrajectoryRecord) -> None:
        self.tally.add(record)
        assert self._rollout is not None
        counts = self._rollout.progress()
        self.tally.slots = max(self.tally.slots, int(counts.get("slots", 0)))
        self.tally.tool_cpus = max(self.tally.tool_cpus, int(counts.get("tool_cpus", 0)))

    def _stop(self, to_resume: bool) -> None:
        """On the first signal: abort running trajectories, or the start if none runs yet."""
        left = "the others go on with --resume" if to_resume else "interrupt again to end at once"
        self.progress.message(f"stopping: finished trajectories are kept; {left}")
        if self._rollout is None or not self._rollout.interrupt(to_resume):
            assert self._task is not None
            self._task.cancel()


def _environment(order: RolloutOrder, *, by_value: bool) -> Environment:
    here = import_from_here()
    scales = {"token_scale": order.work.token_scale, "tool_scale": order.work.tool_scale}
    given = {name: value for name, value in scales.items() if value is not None}
    return mixed_environment(
        order.work.env,
        partial(_loaded, options=given, reward=order.work.reward, here=here if by_value else ""),
    )


def _loaded(spec: str, *, options: dict[str, float], reward: str | None, here: str) -> Environment:
    """One environment, with the reward that was given in place of its own; `here` is sent to workers by value."""
    environment = load_environment(spec, options=options)
    if here:
        _send_by_value(spec.partition(":")[0], here)
    if reward is None:
        return environment
    scored = rewarded(environment, reward)
    if here and not reward.startswith(("http://", "https://")):
        _send_by_value(reward.partition(":")[0], here)
    return scored


def _groups_text(plan: ClusterPlan) -> str:
    jobs = ", ".join(f"{group.minimum} to {group.most} of {name}" for name, group in plan.groups.items())
    return f"worker groups ({plan.backend}, jobs: {jobs})"


def _send_by_value(name: str, here: str) -> None:
    """Pickle a module of this directory by value: workers of another cluster cannot import it."""
    module = sys.modules.get(name)
    path = getattr(module, "__file__", None)
    if module is not None and path is not None and Path(path).parent.is_relative_to(here):
        cloudpickle.register_pickle_by_value(module)


def _dashboard(asked: bool | None) -> bool:
    installed = find_spec("bokeh") is not None
    if asked and not installed:
        raise BadInput("--dashboard needs bokeh: install it with `pip install bokeh`")
    return installed if asked is None else asked
