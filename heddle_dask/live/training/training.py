"""Carries the training loop out on a cluster: rollout in the background, a trainer, weights, evaluations, logs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.live.training.evaluation import Evaluation
from heddle_dask.live.training.rollout_feed import StreamFeed
from heddle_dask.live.training.sample_intake import SampleIntake
from heddle_dask.live.training.trackers import Tracker, tracked_numbers
from heddle_dask.live.training.trainer_patience import TrainerPatience
from heddle_dask.live.training.weight_control import WeightControl
from heddle_dask.training.batch_files import batch_path, load_batch
from heddle_dask.training.json_lines import append_lines, read_lines
from heddle_dask.training.loop import (
    BatchReady,
    EndTraining,
    Evaluate,
    EvaluationEnded,
    FormBatch,
    LoopCommand,
    LoopEvent,
    LoopStart,
    OpenBatches,
    PublishEnded,
    PublishLost,
    PublishVersion,
    StepTrained,
    StopAsked,
    SwitchEnded,
    SwitchVersion,
    TrainingLoop,
    TrainOnBatch,
    WeightsCopied,
)
from heddle_dask.training.mismatch import MismatchGuard
from heddle_dask.training.plan import TrainingPlan
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.step_row import StepClock, StepSeconds, WasteMeter, step_row
from heddle_dask.training.trainer import Trainer, TrainReport
from heddle_dask.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class TrainingParts:
    """What a training consists of; each part is open already."""

    plan: TrainingPlan
    lineage: str  # the line of training
    feed: StreamFeed
    intake: SampleIntake
    trainer: Trainer
    store: WeightStore
    control: WeightControl
    evaluation: Evaluation | None
    directory: TrainingDirectory
    trackers: tuple[Tracker, ...]
    decode: Callable[[Any], str]  # tokens to text
    note: Callable[[str], None]  # takes one line for people
    mismatch: MismatchGuard = field(default_factory=MismatchGuard)
    checkpoint_every_s: float = 0.0  # of the trainer, where it is not the default


class LiveTraining:
    """One training, from where `start` says to its end.

    Whatever fails (the rollout, the trainer, the store) ends it with that error; what is in the directory is enough to
    go on.
    """

    def __init__(self, parts: TrainingParts, start: LoopStart) -> None:
        self._parts = parts
        self._start = start
        self._loop = TrainingLoop(parts.plan, start)
        self._clock = StepClock()
        self._waste = WasteMeter()
        self._events: asyncio.Queue[LoopEvent] = asyncio.Queue()
        self._began_s = time.monotonic()
        self._report: TrainReport | None = None
        self._patience = TrainerPatience(
            parts.note, lambda: getattr(parts.trainer, "doing", ""), least_s=2 * parts.checkpoint_every_s
        )
        self._newest_evaluation = max(
            read_lines(parts.directory.evaluations), key=lambda row: int(row["number"]), default=None
        )
        self._best = self._best_reward()

    def stop(self) -> None:
        """End after the step that is being trained. Belongs to the event loop."""
        self._events.put_nowait(StopAsked())

    @property
    def phase(self) -> str:
        return self._loop.phase

    @property
    def installed(self) -> int:
        """Number of the weights that all engines have."""
        return self._loop.installed

    async def run(self) -> EndTraining:
        """Train until all steps are done or `stop` was called."""
        version = self._version(self._start.trained)
        self._parts.control.begins(version, self._parts.intake.untrained_trajectories)
        self._waste.skip(self._parts.intake.counts, self._parts.feed.wasted_tokens)
        try:
            async with asyncio.TaskGroup() as tasks:
                feed = tasks.create_task(self._parts.feed.follow())
                ended = await self._follow_loop(tasks)
                feed.cancel()
                return ended
        except BaseExceptionGroup as group:
            # One task failed, and the group has cancelled the others: its error is what there is to say.
            raise _first_of(group) from None

    @property
    def unlogged_seconds(self) -> StepSeconds:
        """Seconds after the last row of metrics; may be asked for once, at the end."""
        return self._clock.take()

    async def _follow_loop(self, tasks: asyncio.TaskGroup) -> EndTraining:
        commands = self._loop.begin()
        running: dict[asyncio.Task[None], LoopCommand] = {}
        while True:
            self._clock.gave(self._now(), commands)
            for command in commands:
                if isinstance(command, EndTraining):
                    await _end(running)
                    await self._patience.of("save", self._parts.trainer.save(self._version(command.trained)))
                    return command
                if isinstance(command, OpenBatches):
                    self._parts.feed.open_batches(command.through)
                    continue
                task = tasks.create_task(self._carry_out(command))
                running[task] = command
                task.add_done_callback(running.pop)
            event = await self._events.get()
            self._clock.took(self._now(), event)
            if isinstance(event, StepTrained):
                self._log_step(event.step)
            commands = self._loop.handle(event)

    async def _carry_out(self, command: LoopCommand) -> None:
        parts = self._parts
        event: LoopEvent
        match command:
            case FormBatch(step):
                await parts.intake.batch(step)
                event = BatchReady(step)
            case TrainOnBatch(step):
                await self._train(step)
                event = StepTrained(step)
            case PublishVersion(number, evaluated):
                event = await self._publish(number, evaluated=evaluated)
            case SwitchVersion(number):
                await parts.control.switch(self._version(number))
                event = SwitchEnded(number)
            case Evaluate(number):
                await self._evaluate(self._version(number))
                event = EvaluationEnded(number)
            case OpenBatches() | EndTraining():
                raise AssertionError(command)
            case _:
                assert_never(command)
        self._events.put_nowait(event)

    async def _train(self, step: int) -> None:
        version = self._version(step)
        path = batch_path(self._parts.directory.batches, step)
        self._report = await self._patience.of("train", self._parts.trainer.train(path, version))
        # The batch is on disk: a restart trains it again, and gives its samples to no other. n has grown.
        self._parts.intake.trained(version)
        self._parts.control.stepped(version)

    async def _publish(self, number: int, *, evaluated: bool) -> PublishEnded | PublishLost:
        parts, version = self._parts, self._version(number)

        def copied() -> None:
            self._events.put_nowait(WeightsCopied(number))

        order = parts.trainer.publish(version, parts.store.uri, copied, evaluated=evaluated)
        uri = await self._patience.of("publish", order)
        if uri is None:
            parts.note(f"weights {version} died with their trainer before they were published; newer ones follow")
            return PublishLost(number)
        manifest = await asyncio.to_thread(parts.store.manifest, version)
        parts.control.published(version, uri, 0 if manifest is None else manifest.nbytes)
        await asyncio.to_thread(self._prune, await parts.control.in_use(version.lineage))
        return PublishEnded(number)

    def _prune(self, in_use: set[PolicyVersion]) -> None:
        self._parts.store.prune(self._parts.lineage, KEPT_VERSIONS, in_use)

    async def _evaluate(self, version: PolicyVersion) -> None:
        parts = self._parts
        assert parts.evaluation is not None
        await parts.feed.engines_there()  # the evaluation shares those of the rollout
        row = await parts.evaluation.of(version)
        parts.directory.add_evaluation(row)
        self._newest_evaluation = row
        reward = row["reward"]
        parts.note(f"evaluation of weights {version.number}: {_reward_text(row)}")
        if version.number and reward is not None and (self._best is None or reward > self._best):
            self._best = reward
            await parts.trainer.keep_best(version, reward)

    def _log_step(self, step: int) -> None:
        parts = self._parts
        assert self._report is not None
        batch = load_batch(batch_path(parts.directory.batches, step))
        row = step_row(
            batch,
            self._report,
            parts.intake.counts,
            wasted_tokens=self._waste.take(parts.intake.counts, parts.feed.wasted_tokens),
            mix_sampled=parts.feed.mix_sampled,
            seconds=self._clock.take(),
            elapsed_s=self._now(),
            generated_tokens=parts.feed.generated_tokens,
            held_out=self._newest_evaluation,
        )
        append_lines(parts.directory.samples, parts.intake.texts(batch, parts.decode))
        parts.directory.add_metrics(row)
        figures = tracked_numbers(row)
        parts.control.show(step, figures)
        for tracker in parts.trackers:
            tracker.log(step, figures)
        parts.note(step_line(row, parts.plan.steps))
        # What is logged, and in every checkpoint that a restart may begin with, nobody reads again.
        parts.intake.forget_batches(min(step, self._report.state.kept_from))
        if line := parts.mismatch.judge(step, self._report.metrics):
            parts.note(line)

    def _best_reward(self) -> float | None:
        rewards = [row["reward"] for row in read_lines(self._parts.directory.evaluations) if int(row["number"])]
        return max((reward for reward in rewards if reward is not None), default=None)

    def _version(self, number: int) -> PolicyVersion:
        return PolicyVersion(self._parts.lineage, number)

    def _now(self) -> float:
        return time.monotonic() - self._began_s


async def _end(running: Mapping[asyncio.Task[None], LoopCommand]) -> None:
    """End what the loop does not wait for any more. The trainer is let finish: its process would go on by itself."""
    left = [task for task, command in running.items() if isinstance(command, PublishVersion)]
    for task in running:
        if task not in left:
            task.cancel()
    if left:
        await asyncio.wait(left)


KEPT_VERSIONS = 2
"""Versions that stay in the weight store besides those that engines use: an engine may be fetching the last but one."""


def step_line(row: Mapping[str, Any], steps: int) -> str:
    seconds = row["seconds"]
    ages = " ".join(f"{age}:{count}" for age, count in row["staleness"].items())
    held_out = row["held_out_reward"]
    known = "" if held_out is None else f" (held out {held_out:.3f} at {row['held_out_number']})"
    return (
        f"step {row['step']}/{steps}: reward {row['reward']:.3f}{known}, {row['samples']} samples, ages {ages}; "
        f"waited {seconds['wait']:.1f} s, trained {seconds['train']:.1f} s"
    )


def _reward_text(row: Mapping[str, Any]) -> str:
    if row["reward"] is None:
        return "no reward is known"
    low, high = row["reward_ci"]
    return f"reward {row['reward']:.3f} [{low:.3f}, {high:.3f}] on {row['tasks']} held-out tasks"


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
