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
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distributed import Client
from rich.text import Text

from heddle_dask.cli.cluster_choice import CONNECT_TIMEOUT_S, TlsFiles, local_client, remote_client, workers_joined
from heddle_dask.cli.engine_option import chosen_model, parsed_vllm_options
from heddle_dask.cli.field_options import Asked
from heddle_dask.cli.group_cluster import check_plan, engines_of_groups, groups_client, plan_of_file
from heddle_dask.cli.one_line import EXIT_FAILED, EXIT_TERMINATED, EXIT_TO_RESUME, one_line
from heddle_dask.cli.rollout.interrupts import Interrupts
from heddle_dask.cli.rollout.parsed_options import (
    asked_strategy,
    check_cost,
    check_gpus,
    environment_of,
    local_shape,
    parsed_cost,
    parsed_degrees,
    parsed_template_kwargs,
    with_affinity,
)
from heddle_dask.cli.rollout.run_logs import RunLogs
from heddle_dask.cli.rollout.summary import Tally, table
from heddle_dask.cli.stored_run import StoredRun, check_out, default_out, remove_if_empty
from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.view import StrategySet
from heddle_dask.engines.collector import collect_seldom
from heddle_dask.engines.gpus import usable_gpus
from heddle_dask.engines.spec import EngineKind, engine_kind
from heddle_dask.environments.base import Environment, Task
from heddle_dask.environments.mix import mix_of
from heddle_dask.environments.rewards import reward_identity
from heddle_dask.live.clusters.credentials import connection_file
from heddle_dask.live.clusters.quota_table import quotas_of_file
from heddle_dask.live.driver.connection.control_channel import ClusterLost
from heddle_dask.live.driver.connection.encryption import UnencryptedConnection
from heddle_dask.live.driver.files.continuation import check_continues, task_list
from heddle_dask.live.driver.files.resume import batch_of
from heddle_dask.live.driver.files.run_files import software_versions
from heddle_dask.live.driver.inputs.loaded_model import tokenizer_digest
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.inputs.rollout_inputs import ChatModel, Output, tasks_of
from heddle_dask.live.driver.inputs.telemetry import Telemetry
from heddle_dask.live.driver.options import Budget, Engines, Patience, Sampling
from heddle_dask.live.driver.programs.attempts import domains_of
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.runs.progress import Meter, ProgressDisplay
from heddle_dask.live.driver.session.tp_degree_specs import TpDegreeSpecs
from heddle_dask.live.scheduler.warm_start import check_warm
from heddle_dask.records.schema import counted
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.strategies.affinity.hardware_map import check_classes, check_domains
from heddle_dask.views.drawing.safe_console import SafeConsole
from heddle_dask.weights.model_directory import model_digest

_LOST = re.compile(r"engine \S+ is lost: ")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a rollout: the JSON object and the exit code."""

    result: dict[str, Any]
    exit_code: int


def run_rollout(asked: Asked, *, to_stderr: bool) -> Outcome:
    """Run it; prints progress on stderr and the table on stdout, or on stderr too."""
    run = RolloutRun(asked, ProgressDisplay(SafeConsole(stderr=True)))
    prepare_process()
    try:
        exit_code = asyncio.run(run.run())
    finally:
        if asked["mode"] == "create":
            remove_if_empty(run.out)
    out = str(run.out) if run.out.exists() else None
    SafeConsole(stderr=to_stderr).print(table(run.tally, out), soft_wrap=True)
    if run.lost:
        one_line(f"{run.lost}{run.logs.tail('scheduler')}; {run.left_to_do(out)}")
    failure = run.tally.failure or ""
    if failure and exit_code == 0:
        SafeConsole(stderr=True).print(Text(f"heddle: {failure}"), soft_wrap=True)
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

    trainer_gpus = 0
    """GPUs that a trainer takes for itself."""

    def __init__(self, asked: Asked, progress: ProgressDisplay) -> None:
        self.asked = asked
        self.progress = progress
        self.seed: int = asked["seed"]
        scheduler, cluster = asked["scheduler"], asked["cluster"]
        strategy = asked_strategy(asked)
        retries = RetryPolicy.parse(asked["retries"])
        kind = engine_kind(asked["engine"])
        self.tally = Tally(queued_inside=kind.prefill_includes_queue)
        self.out: Path = asked["out"] or default_out(asked["env"], datetime.now())
        self.shape = local_shape(asked)
        self.plan = plan_of_file(cluster)
        if cluster is not None and self.plan is not None:
            check_plan(self.plan, cluster, asked.given)
        elif cluster is not None:
            self.shape = self.shape.overlaid(cluster, asked.given)
        self.strategy = with_affinity(strategy, cluster)
        self.pools = Pools(quotas=quotas_of_file(cluster))
        self.is_local = scheduler is None and self.plan is None
        predictor = strategy.build(seed=self.seed).predictor
        self.engines = self._engines()
        self.sampling = asked.object_of(Sampling)
        self.chat_template_kwargs = parsed_template_kwargs(asked["chat_template_kwargs"])
        check_out(self.out, asked["mode"])
        self.logs = RunLogs(self.out, asked["mode"])
        self.environment, self.tasks = self._environment_and_tasks()
        self.tally.mix.update(mix_of(self.environment, self.tasks, asked["samples"]))
        self.model = chosen_model(asked["model"], asked["engine"], self.engines.options)
        check_cost(self.engines.cost, self.model, asked["engine"])
        self.budget = asked.object_of(Budget, retries=retries)
        self._check_affinity()
        if self.plan is not None:
            self.engines = engines_of_groups(
                self.engines, self.plan, self.model, self.budget.max_context_tokens, self.seed
            )
        self._check_degrees()
        # With --scheduler the scheduler reads this file, possibly from another file system.
        if scheduler is None and predictor is not None and predictor.options.get("warm"):
            check_warm(str(predictor.options["warm"]))
        if self.is_local:
            self._check_machine(kind)
        self.dashboard = _dashboard(asked["dashboard"])
        self.telemetry = Telemetry(endpoint=asked["otel"])
        self.left: int = asked["tasks"] * asked["samples"]
        self.is_finished = False
        if asked["mode"] in ("append", "resume"):
            self._take_over(resumes=asked["mode"] == "resume")
        self.lost = ""
        self._interrupts = Interrupts(self._stop)
        self._task: asyncio.Task[Any] | None = None
        self._rollout: Rollout | None = None

    def _environment_and_tasks(self) -> tuple[Environment, Sequence[Task]]:
        environment = environment_of(self.asked, by_value=not self.is_local)
        return environment, tasks_of(self.asked["tasks"], environment, self.seed)

    def _check_affinity(self) -> None:
        strategies = self.strategy.build(seed=self.seed)
        self._check_domains(strategies)
        if self.shape.hardware is not None or self.plan is not None:
            classes: Collection[str] = self.shape.hardware or ()
            if self.plan is not None:
                classes = [group.hardware for group in self.plan.groups.values()]
            check_classes(strategies, classes)

    def _check_domains(self, strategies: StrategySet) -> None:
        check_domains(strategies, domains_of(self.environment, self.tasks))

    def _engines(self) -> Engines:
        asked = self.asked
        by_default = asked["scheduler"] and "engines" in asked.by_default
        return asked.object_of(
            Engines,
            # None: as many as the cluster says, or has workers for.
            count=None if self.plan is not None or by_default else self.shape.engines,
            slots=self.shape.slots,
            tp_degrees=parsed_degrees(asked["tp_degrees"]),
            cost=parsed_cost(asked["cost"]),
            **({} if self.shape.engines_per_gpu is None else {"engines_per_gpu": self.shape.engines_per_gpu}),
            options=parsed_vllm_options(asked["engine"], asked.values),
            patience=asked.object_of(Patience, engines_s=self._engine_timeout_s()),
        )

    def _engine_timeout_s(self) -> float:
        """Longest start of an engine: as the option says, else as the groups do."""
        given_s: float = self.asked["engine_timeout"]
        if self.plan is None or "engine_timeout" not in self.asked.by_default:
            return given_s
        return max(group.start_timeout_s for group in self.plan.groups.values() if group.role == "rollout")

    def _check_degrees(self) -> None:
        """Refuse, before anything starts, engines that this model or this machine cannot have."""
        tp_degrees = self.engines.tp_degrees
        if tp_degrees is None:
            return
        needed = 0 if tp_degrees == "auto" else sum(tp_degrees)
        workers = self.shape.engines
        if self.asked["scheduler"] is None and needed > workers:
            raise BadInput(
                f"--tp {self.asked['tp_degrees']} need {needed} workers, and --engines {workers} says how many "
                f"there are: use --engines {needed}"
            )
        spec = self.engines.spec_for(self.model, self.budget.max_context_tokens, self.seed)
        TpDegreeSpecs(spec, self.engines.cost).check(tp_degrees)

    def _check_machine(self, kind: EngineKind) -> None:
        """Refuse, before a cluster starts here, engines that this machine cannot run."""
        if kind.uses_gpus():
            gpus = usable_gpus(os.environ)
            check_gpus(self.shape.engines, self.engines.engines_per_gpu, self.trainer_gpus, gpus)
            if self.engines.tp_degrees is None:
                kind.check(self.engines.spec_for(self.model, self.budget.max_context_tokens, self.seed))
        elif self.shape.engines_per_gpu is not None:
            raise BadInput(f"--engines-per-gpu: {kind.name} engines use no GPUs on this machine: leave it out")
        kind.check_installed()

    def _take_over(self, *, resumes: bool) -> None:
        """Refuse, before a cluster starts, what would not continue the run; count what is there of a resumed one."""
        before = StoredRun(self.out)
        spec = self.engines.spec_for(self.model, self.budget.max_context_tokens, self.seed)
        mine = {
            "environment": self.environment.name,
            "model": self.model,
            "tokenizer": tokenizer_digest(self.model),
            "engine": spec.to_mapping(),
            "logprobs": spec.options.logprobs,
            "sampling": asdict(self.sampling),
            "limits": self.budget.replayed,
            "chat_template_kwargs": self.chat_template_kwargs,
            "seed": self.seed,
            "samples": self.asked["samples"],
            "weights": model_digest(self.model),
            "rewards": reward_identity(self.environment),
            **self.pools.description(),
            "task_list": task_list(self.tasks),
            **software_versions(),
        }
        accepts = self.asked["accept_changes"]
        check_continues(self.out, before.metadata, mine, resumes=resumes, accepts=accepts)
        if not resumes:
            return
        for record in before.outlines():
            self.tally.add(record, timed=False)
        last = counted(before.metadata, "batches", 1) - 1
        stored = sum(batch_of(trajectory_id) == last for trajectory_id in before.ids)
        self.left = max(0, self.left - stored)
        self.is_finished = self.left == 0 and not before.recovered

    async def run(self) -> int:
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
        asked = self.asked
        if asked["scheduler"] is not None:
            tls = TlsFiles(asked["tls_ca_file"], asked["tls_cert"], asked["tls_key"])
            async with remote_client(asked["scheduler"], CONNECT_TIMEOUT_S, tls) as client:
                yield client
            return
        async with self.logs.kept() as logs:
            if self.plan is not None:
                groups = self.plan.groups.items()
                jobs = ", ".join(f"{group.minimum} to {group.most} of {name}" for name, group in groups)
                self.progress.message(
                    f"starting a cluster of worker groups ({self.plan.backend}, jobs: {jobs}); "
                    f"logs: {self.plan.logs or logs}"
                )
                async with groups_client(self.plan, self.plan.logs or logs, self.progress.message) as client:
                    with connection_file(logs, client.cluster):
                        yield client
                return
            self.progress.message(f"starting a local cluster for {self.shape.engines} engine(s); logs: {logs}")
            async with local_client(self.shape, self.dashboard, logs) as client:
                with connection_file(logs, client.cluster):
                    yield client

    async def _roll_out(self, client: Client) -> None:
        # The template's imports block this loop for seconds; the workers of a local cluster start meanwhile.
        rollout = self._make(client)
        if self.is_local:
            await workers_joined(client, self.shape)
        self._say_where_to_look(client)
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

    def _say_where_to_look(self, client: Client) -> None:
        if self.asked["scheduler"] is None:
            self.progress.message(f"watch it with: heddle top {shlex.quote(str(self.out))}")
        if self.dashboard:
            self.progress.message(f"dashboard: {client.dashboard_link.removesuffix('/status')}/heddle")

    def _make(self, client: Client) -> Rollout:
        facts: dict[str, Any] = {"tasks": self.asked["tasks"], "command": sys.argv[1:]}
        if self.is_local:
            facts["tool_cpus"] = self.shape.all_tool_cpus
        return Rollout(
            client,
            env=self.environment,
            model=ChatModel(self.model, self.chat_template_kwargs),
            engines=self.engines,
            strategy=self.strategy,
            samples=self.asked["samples"],
            seed=self.seed,
            out=Output(self.out, self.asked["mode"], facts, self.telemetry, self.asked["accept_changes"]),
            budget=self.budget,
            pools=self.pools,
            sampling=self.sampling,
            progress=self._told,
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


def _dashboard(asked: bool | None) -> bool:
    installed = find_spec("bokeh") is not None
    if asked and not installed:
        raise BadInput("--dashboard needs bokeh: install it with `pip install bokeh`")
    return installed if asked is None else asked
