"""Runs one training from the command line: cluster, rollout, trainer, loop, signals, result."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from distributed import Client

from heddle_dask.apis.rewarded import rewarded
from heddle_dask.cli.cluster_choice import workers_joined
from heddle_dask.cli.one_line import EXIT_FAILED, one_line
from heddle_dask.cli.rollout.run import Outcome, RolloutRun, prepare_process
from heddle_dask.cli.show.training_report import show_training
from heddle_dask.cli.train.order import TrainOrder, check_out_parent
from heddle_dask.core.errors import BadInput
from heddle_dask.core.view import StrategySet
from heddle_dask.engines.model_services.spec import ServiceFailed
from heddle_dask.engines.spec import ReceivesBroadcasts, engine_kind
from heddle_dask.environments.base import Environment, Task
from heddle_dask.environments.loading import held_out_name, load_environment
from heddle_dask.environments.mix import mixed_source, parse_mix
from heddle_dask.live.driver.files.run_writer import journal_path
from heddle_dask.live.driver.inputs.loaded_model import tokenizer_digest
from heddle_dask.live.driver.inputs.rollout_inputs import ChatModel, check_replayed_calls
from heddle_dask.live.driver.options import Sampling
from heddle_dask.live.driver.programs.attempts import domains_of
from heddle_dask.live.driver.rollout import Rollout
from heddle_dask.live.driver.runs.progress import ProgressDisplay
from heddle_dask.live.training.evaluation import Evaluation, HeldOutTasks
from heddle_dask.live.training.going_on import OpenedTraining, begin_anew, check_store, go_on
from heddle_dask.live.training.remote_trainer import RemoteTrainer
from heddle_dask.live.training.rollout_feed import StreamFeed
from heddle_dask.live.training.sample_intake import SampleIntake
from heddle_dask.live.training.trackers import TRACKERS
from heddle_dask.live.training.trainer_patience import TrainerSilent
from heddle_dask.live.training.training import LiveTraining, TrainingParts
from heddle_dask.live.training.weight_control import NoEngineUpdated, WeightControl
from heddle_dask.strategies.affinity.hardware_map import check_domains
from heddle_dask.training.json_lines import read_lines
from heddle_dask.training.loop import EndTraining
from heddle_dask.training.mismatch import EnginesDiffer, MismatchGuard
from heddle_dask.training.step_row import StepSeconds
from heddle_dask.training.stored_samples import BUFFER_LOG
from heddle_dask.training.trainer import Trainer
from heddle_dask.training.trainer_spec import TrainerSpec, learning_options
from heddle_dask.training.training_result import training_result
from heddle_dask.views.drawing.safe_console import SafeConsole
from heddle_dask.weights.collective import store_uri
from heddle_dask.weights.store import WeightStore

_HELD_OUT_SEED = 1_000_003
"""Added to the seed where a user's environment draws held-out tasks: its training tasks have other seeds."""


def run_training(order: TrainOrder, *, to_stderr: bool) -> Outcome:
    """Train; prints progress on stderr and the tables on stdout, or on stderr too."""
    run = TrainRun(order, ProgressDisplay(SafeConsole(stderr=True)))
    prepare_process()
    try:
        exit_code = asyncio.run(run.run())
    finally:
        run.remove_if_not_begun()
    directory = order.directory
    if directory.is_training():
        show_training(directory.path, to_stderr=to_stderr)
    result = training_result(
        read_lines(directory.metrics), read_lines(directory.evaluations), str(directory.path), run.unlogged
    )
    if run.lost:
        one_line(f"{run.lost}; {_go_on_text()}")
    elif exit_code:
        one_line(f"stopped after step {result['steps']} of {order.plan.steps}: {_go_on_text()}")
    return Outcome(result, exit_code)


def _go_on_text() -> str:
    return "go on by the same command with --resume"


def _check_trainer(options: Mapping[str, Any]) -> None:
    """Refuse, before anything starts, a training whose trainer cannot start on this machine."""
    for module, name in (("torch", "PyTorch"), ("transformers", "transformers")):
        if find_spec(module) is None:
            raise BadInput(f"heddle train needs {name}, which is not installed: `pip install {module}` (or the extras)")
    if options.get("lora_rank") and find_spec("peft") is None:
        raise BadInput("--lora needs peft, which is not installed: `pip install peft`")


class TrainRun(RolloutRun):
    """One training. The constructor checks every option that can be checked without starting a process."""

    @property
    def trainer_gpus(self) -> int:  # type: ignore[override]
        spec = self.train.trainer
        return 0 if spec.get("shares_gpus") or spec.get("device") == "cpu" else int(spec["ranks"])

    def __init__(self, order: TrainOrder, progress: ProgressDisplay) -> None:
        self.train = order
        check_out_parent(order.directory.path)
        super().__init__(order.rollout, progress)
        if self.is_local:
            _check_trainer(order.trainer)
        self.shape = replace(self.shape, trainers=max(1, self.shape.trainers))
        self.source = mixed_source(order.rollout["env"], self._load, order.rollout["seed"])
        if order.groups.prefixes is not None and self.engines.options is not None:
            check_replayed_calls(self.engines.options)
        self.store = WeightStore(store_uri(order.store, order.directory.weights))
        if self.store.is_broadcast:
            kind = engine_kind(self.engines.kind)
            assert isinstance(kind, ReceivesBroadcasts)  # else the order was refused
            options = kind.receiving(self.engines.options or kind.options_type())
            self.engines = replace(self.engines, options=options)
        check_store(self.store, self._own_lineages())
        self.held_out = self._held_out()
        self.unlogged = StepSeconds()
        self._training: LiveTraining | None = None

    def _check_domains(self, strategies: StrategySet) -> None:
        """The names of all environments: tasks come without end, of any kind."""
        check_domains(strategies, domains_of(self.environment, ()), all_known=False)

    def _load(self, spec: str) -> Environment:
        environment = load_environment(spec)
        reward = self.train.rollout["reward"]
        return environment if reward is None else rewarded(environment, reward)

    def _own_lineages(self) -> list[str]:
        """Those of the training that is there: it is gone on with, or replaced."""
        if not self.train.directory.is_training():
            return []
        return [str(each["lineage"]) for each in self.train.directory.description()["lineages"]]

    def _held_out(self) -> list[HeldOutTasks]:
        """The held-out tasks, in equal parts from each environment."""
        asked = self.train.evaluation
        if not asked.tasks:
            return []
        parts = parse_mix(self.train.rollout["env"])
        each = math.ceil(asked.tasks / len(parts))
        return [
            HeldOutTasks(
                environment,
                self._held_out_tasks(part.spec, environment, each),
                asked.samples,
                asked.temperature,
            )
            for part in parts
            for environment in [self._load(held_out_name(part.spec))]
        ]

    def _held_out_tasks(self, spec: str, environment: Environment, count: int) -> Sequence[Task]:
        seed = self.seed
        return environment.tasks(count, seed if held_out_name(spec) != spec else seed + _HELD_OUT_SEED)

    def _take_over(self, *, resumes: bool) -> None:
        """A training looks at its own description (`TrainingDirectory.begin`)."""

    async def run(self) -> int:
        order = self.train
        self._description = order.description(self.model, tokenizer_digest(self.model))
        if order.mode == "overwrite":
            for lineage in self._own_lineages():
                self.store.remove(lineage)
        order.directory.begin(self._description, order.mode, uuid4().hex[:8])
        self.store.check_writable()
        try:
            return await super().run()
        except (EnginesDiffer, NoEngineUpdated, ServiceFailed, TrainerSilent) as error:
            self.lost = str(error)
            return EXIT_FAILED

    def remove_if_not_begun(self) -> None:
        """Remove a new directory in which no task was begun, so that the same command can be given again."""
        directory = self.train.directory
        if self.train.mode == "create" and directory.is_training() and not (directory.path / BUFFER_LOG).exists():
            shutil.rmtree(directory.path)

    async def _roll_out(self, client: Client) -> None:
        rollout = self._make(client)
        if self.is_local:
            await workers_joined(client, self.shape)
        self._say_where_to_look(client)
        async with AsyncExitStack() as stack:
            opened = await self._opened(client, stack)
            stack.callback(opened.samples.close)
            self.train.directory.changes(self._description)
            self._rollout = await stack.enter_async_context(rollout)
            ended = await self._train_on(client, rollout, opened, stack)
            if not ended.stopped:
                self.progress.message("done; ending every process")

    async def _opened(self, client: Client, stack: AsyncExitStack) -> OpenedTraining:
        """What the training begins with; `stack` ends a trainer also where this does not return."""
        order = self.train

        async def end(trainer: Trainer) -> None:
            if client.status == "running":
                await trainer.close()

        async def open_trainer(
            lineage: str, checkpoint: str, learning: Mapping[str, Any] = MappingProxyType({})
        ) -> Trainer:
            spec = TrainerSpec(
                model=self.model,
                checkpoints=str(order.directory.checkpoints.absolute()),
                lineage=lineage,
                start=checkpoint,
                batches=str(order.directory.batches.absolute()),
                **{**order.trainer, **learning},
            )
            trainer = RemoteTrainer(client, spec, self._told)
            stack.push_async_callback(end, trainer)
            await trainer.state()  # a model that it cannot load is refused before anything is rolled out
            return trainer

        if order.mode == "resume":
            journal = journal_path(order.directory.rollout)
            learning = learning_options(order.trainer)
            return await go_on(order.directory, order.rule, self.store, open_trainer, learning, journal, self._told)
        return await begin_anew(order.directory, order.rule, open_trainer)

    async def _train_on(
        self, client: Client, rollout: Rollout, opened: OpenedTraining, stack: AsyncExitStack
    ) -> EndTraining:
        order = self.train
        feed = StreamFeed(rollout)
        intake = SampleIntake(opened.samples, opened.lineage, feed.replace_groups)

        def begun(group_id: str) -> None:
            intake.begun(group_id, opened.start.trained if self._training is None else self._training.installed)

        stack.push_async_callback(feed.close)
        session = await feed.open(self.source, order.groups, intake.accepts, intake.counted, begun, intake.dropped)
        trackers = tuple(
            TRACKERS[name](order.directory.path, order.directory.description()["asked"]) for name in order.report_to
        )
        for tracker in trackers:
            stack.callback(tracker.close)
        parts = TrainingParts(
            plan=order.plan,
            lineage=opened.lineage,
            feed=feed,
            intake=intake,
            trainer=opened.trainer,
            store=self.store,
            control=WeightControl(client, session, self._told),
            evaluation=self._evaluation(client),
            directory=order.directory,
            trackers=trackers,
            decode=rollout.template.decode,
            note=self._told,
            mismatch=MismatchGuard(order.mismatch),
            checkpoint_every_s=order.trainer.get("checkpoint_every_s", 0.0),
        )
        self._training = training = LiveTraining(parts, opened.start)
        try:
            return await training.run()
        finally:
            self.unlogged = training.unlogged_seconds

    def _evaluation(self, client: Client) -> Evaluation | None:
        if not self.held_out:
            return None
        # The training's session provides the engines: an evaluation takes those that are there.
        engines = replace(self.engines, tp_degrees=None, count=1)

        def open_rollout(held_out: HeldOutTasks) -> Rollout:
            return Rollout(
                client,
                env=held_out.environment,
                model=ChatModel(self.model, self.chat_template_kwargs),
                engines=engines,
                strategy=self.strategy.among(domains_of(held_out.environment, held_out.tasks)),
                samples=held_out.samples,
                seed=self.seed,
                budget=self.budget,
                pools=self.pools,
                sampling=Sampling(held_out.temperature),
                progress=False,
            )

        return Evaluation(self.held_out, open_rollout)

    def _stop(self, to_resume: bool) -> None:
        """On the first signal: end after the step that is being trained, or the start if there is none yet."""
        self.progress.message("stopping after the step that is being trained; interrupt again to end at once")
        if self._training is not None:
            self._training.stop()
        elif self._task is not None:
            self._task.cancel()
