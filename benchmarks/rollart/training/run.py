"""A training run in virtual time: source, sample buffer, trainer and weight updates around a simulated cluster."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.rollart.training.rules import TrainingRules
from benchmarks.rollart.training.sample_groups import DrawGroup, SampleGroup, TrainedBatch
from benchmarks.rollart.training.times import TrainingTimes
from benchmarks.rollart.training.world import TrainingWorld
from heddle_dask.core.run_description import REDUNDANT, STALE
from heddle_dask.sim.program import Program
from heddle_dask.training.buffer_events import GroupDropped
from heddle_dask.training.loop import (
    BatchReady,
    EndTraining,
    Evaluate,
    FormBatch,
    LoopCommand,
    LoopEvent,
    OpenBatches,
    PublishEnded,
    PublishVersion,
    StepTrained,
    SwitchEnded,
    SwitchVersion,
    TrainingLoop,
    TrainOnBatch,
    WeightsCopied,
)
from heddle_dask.training.sample_buffer import BatchWaits, SampleBuffer

_SLICE_S = 5.0
_MOST_S = 1e6
_STEPS_AFTER = 4

MAX_REPEATS = 3
"""As in `training.groups.GroupPlan`: how often a task is asked for again whose group became too old."""


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """A simulated training run; the first `warm` steps do not count. Times are virtual seconds.

    Attributes
    ----------
    step_s
        Mean seconds from the end of one training step to the end of the next.
    tokens
        Mean prompt and sampled tokens of a batch.
    wait_share
        Share of the time in which the trainer did not train.
    rollout_s
        Mean seconds from the end of a training step until the next batch is formed; without overlap, a rollout and the
        update of the weights before it.
    exposed_s
        Mean seconds per step for which engines were paused for weights.
    ages
        Trained trajectories by n - b.
    wasted_tokens
        Sampled tokens by the cause of their loss, whole run.
    sampled_tokens
        Sampled tokens of trajectories that ended, whole run.
    sampled_length, trained_length
        Mean sampled tokens of the trajectories that were started, and of those that were trained on.
    busy_share
        Mean share of the time with a running job, over engines.
    """

    step_s: float
    tokens: float
    wait_share: float
    rollout_s: float
    exposed_s: float
    ages: Mapping[int, int]
    wasted_tokens: Mapping[str, int]
    sampled_tokens: int
    sampled_length: float
    trained_length: float
    busy_share: float
    batches: tuple[TrainedBatch, ...]

    @property
    def tokens_per_s(self) -> float:
        """RollArt's throughput: tokens of a batch over the seconds of a step."""
        return self.tokens / self.step_s

    @property
    def wasted_share(self) -> float:
        """Wasted tokens over all sampled tokens."""
        wasted = sum(self.wasted_tokens.values())
        return wasted / max(1, wasted + self.sampled_tokens)


class SimulatedTraining:
    """Plays a training run: carries out the commands of the training loop (`training.loop`) in virtual time.

    Parameters
    ----------
    draw
        The groups of tasks.
    has_spread
        Whether the members of a group have different rewards, by its id; the sample buffer refuses the others.
    reward_s
        Seconds of the reward stage after a synchronous rollout, of all its trajectories; 0 where rewards are calls of
        the trajectories.
    """

    def __init__(
        self,
        rules: TrainingRules,
        times: TrainingTimes,
        draw: DrawGroup,
        *,
        has_spread: Callable[[str], bool] = lambda _: True,
        reward_s: float = 0.0,
    ) -> None:
        self.rules = rules
        self.times = times
        self.world: TrainingWorld
        self.loop: TrainingLoop
        self.batches: list[TrainedBatch] = []
        self.wasted: Counter[str] = Counter()
        self._draw = draw
        self._has_spread = has_spread
        self._reward_s = reward_s
        # Versions that the loop wants on all engines.
        self._switching: list[int] = []
        self._forming = False
        self._formed: list[SampleGroup] = []
        self._idle_since_s = 0.0
        self._buffer = SampleBuffer(rules.batch_rule, "")
        self._running: dict[str, SampleGroup] = {}
        self._waiting: dict[str, SampleGroup] = {}  # in the buffer, by their ids
        self._opened = 0
        self._accepted = 0  # groups in batches or in the buffer
        self._started = 0  # groups that have a place in a batch
        self._next_task = 0
        self._again: list[tuple[int, int]] = []
        self._started_lengths: list[int] = []
        self._ended_tokens = 0
        self._paused_s: list[tuple[float, float]] = []

    def run(self, world: TrainingWorld, *, steps: int, warm: int) -> TrainingFigures:
        """Play until `warm` + `steps` training steps have ended; the run itself is longer, so its end does not show."""
        self.world = world
        self.loop = TrainingLoop(self.rules.plan(warm + steps + _STEPS_AFTER))
        world.start()
        self._carry_out(self.loop.begin())
        until_s = 0.0
        while len(self.batches) < warm + steps:
            until_s += _SLICE_S
            world.time.run(until_s)
            if until_s > _MOST_S:
                raise RuntimeError("the simulated training does not go on: a bug")
        for engine in world.engines.values():
            engine.close()
        return self._figures(warm, steps)

    # -- loop --------------------------------------------------------------------------------------------------

    def _happened(self, event: LoopEvent) -> None:
        self._carry_out(self.loop.handle(event))

    def _carry_out(self, commands: Sequence[LoopCommand]) -> None:
        time, times = self.world.time, self.times
        for command in commands:
            match command:
                case OpenBatches(through):
                    self._opened = through
                    self._request()
                case FormBatch():
                    self._forming = True
                    self._try_batch()
                case TrainOnBatch(step):
                    self._train(step)
                case PublishVersion(number):
                    self._happened(WeightsCopied(number))
                    time.after(times.publish_s, self._publish_ended, number)
                case SwitchVersion(number):
                    self._switching.append(number)
                    self.world.tell_switch(number)
                case Evaluate() | EndTraining():
                    pass

    def _publish_ended(self, number: int) -> None:
        self.world.tell_published(number)
        self._happened(PublishEnded(number))

    def installed(self, paused_s: float) -> None:
        """An engine has newer weights."""
        self._paused_s.append((self.world.time.now_s, paused_s / len(self.world.engines)))
        oldest = self.world.oldest_version
        ended = [number for number in self._switching if number <= oldest]
        self._switching = [number for number in self._switching if number > oldest]
        for number in ended:
            self._happened(SwitchEnded(number))

    # -- source ------------------------------------------------------------------------------------------------

    def _request(self) -> None:
        """Submit as many groups as the open batches lack; the controller starts them when they have credits."""
        needed = self._opened * self.rules.groups - self._accepted
        running = len(dict.fromkeys(group for group in self._running.values() if group.is_open))
        for _ in range(needed + self.rules.more_groups - running if needed > 0 else 0):
            self._start_group()

    def _start_group(self) -> None:
        if self._again:
            task, attempt = self._again.pop(0)
        else:
            task, attempt = self._next_task, 0
            self._next_task += 1
        plans = tuple(self._draw(task, attempt))
        batch = 1 + self._started // (self.rules.groups + self.rules.more_groups)
        group = SampleGroup(task, attempt, plans, self.rules.members, batch, self._has_spread(plans[0].group_id))
        self._started += 1
        for plan in plans:
            self._running[plan.trajectory_id] = group
            self._started_lengths.append(plan.generated_tokens)
            self.world.submit(plan)

    def admitted(self, program: Program) -> None:
        """A trajectory starts, with the weights that all engines have or with newer ones."""
        group = self._running[program.plan.trajectory_id]
        if group.is_open:
            self._buffer.begin(group.group_id, self.world.oldest_version)

    # -- sink --------------------------------------------------------------------------------------------------

    def ended(self, program: Program) -> None:
        """A trajectory has ended by itself."""
        name = program.plan.trajectory_id
        group = self._running.pop(name)
        if not group.is_open:  # its cancellation was under way
            self.wasted[STALE if group.is_dropped else REDUNDANT] += program.plan.generated_tokens
            return
        self._ended_tokens += program.plan.generated_tokens
        group.done.append(name)
        if group.is_complete:
            self._stop_members(group)
            self._offer(group)
            self._try_batch()

    def cancelled(self, program: Program, cause: str, lost_tokens: int) -> None:
        """A trajectory was cancelled: a stale one with its group, and their task is requested again, first of all."""
        name = program.plan.trajectory_id
        self.wasted[cause] += lost_tokens
        group = self._running.pop(name)
        if cause == STALE and group.is_open:
            self._drop(group, STALE)
            if group.attempt < MAX_REPEATS:
                self._again.append((group.task, group.attempt + 1))
            self._replace(group, 0)
            self._try_batch()

    def _offer(self, group: SampleGroup) -> None:
        """The sample buffer takes a complete group or refuses it; another one replaces it then."""
        (event,) = self._buffer.offer(group.buffered(self.world.first_versions))
        if isinstance(event, GroupDropped):
            self._lose(group, event.cause)
            self._replace(group, 0)
            return
        self._waiting[group.group_id] = group
        self._accepted += 1
        self.world.tell_group(group.group_id, self.rules.members)
        batch, rest = divmod(self._accepted, self.rules.groups)
        if not rest and self.rules.more_groups and not self.rules.keep_losers:
            open_groups = dict.fromkeys(each for each in self._running.values() if each.is_open)
            for late in [each for each in open_groups if each.batch <= batch][: self.rules.more_groups]:
                self._drop(late, REDUNDANT)
                self.world.tell_group(late.group_id, 0)
                self._stop_members(late)

    def _replace(self, group: SampleGroup, accepted: int) -> None:
        """A group does not count, or not any more: its successor is of the same batch."""
        self.world.tell_group(group.group_id, accepted)
        self._started -= 1
        self._request()

    def _stop_members(self, group: SampleGroup) -> None:
        """Members that are not needed are cancelled."""
        for plan in group.plans:
            if plan.trajectory_id in self._running:
                self.world.tell_redundant(plan.trajectory_id)

    def _drop(self, group: SampleGroup, cause: str) -> None:
        """A group that runs will not be delivered."""
        self._buffer.end(group.group_id)
        group.is_dropped = True
        self._lose(group, cause)

    def _lose(self, group: SampleGroup, cause: str) -> None:
        """What the finished members of a group have sampled is lost."""
        done = set(group.done)
        finished = sum(plan.generated_tokens for plan in group.plans if plan.trajectory_id in done)
        self.wasted[cause] += finished
        self._ended_tokens -= finished

    # -- trainer -----------------------------------------------------------------------------------------------

    def _try_batch(self) -> None:
        if not self._forming:
            return
        for event in self._buffer.evict():
            assert isinstance(event, GroupDropped)
            group = self._waiting.pop(event.group_id)
            self._lose(group, event.cause)
            self._accepted -= 1
            self._replace(group, -self.rules.members)
        batch = self._buffer.draw()
        if isinstance(batch, BatchWaits):
            return
        self._forming = False
        self._buffer.form(batch)
        self._formed = [self._waiting.pop(group_id) for group_id in batch.group_ids]
        self._happened(BatchReady(batch.step))
        self._request()

    def _train(self, step: int) -> None:
        now_s, first = self.world.time.now_s, self.world.first_versions
        plans = [plan for group in self._formed for plan in group.delivered]
        tokens = sum(plan.context_tokens for plan in plans)
        begin_s = now_s + self._reward_s
        batch = TrainedBatch(
            step=step,
            taken_s=now_s,
            trained_s=begin_s + self.times.train_s(tokens),
            waited_s=begin_s - self._idle_since_s,
            ages=tuple(step - 1 - first[plan.trajectory_id] for plan in plans),
            tokens=tokens,
            lengths=tuple(plan.generated_tokens for plan in plans),
            names=tuple(plan.trajectory_id for plan in plans),
        )
        self.world.time.at(batch.trained_s, self._step_ended, batch)

    def _step_ended(self, batch: TrainedBatch) -> None:
        self._idle_since_s = self.world.time.now_s
        self.batches.append(batch)
        self._buffer.trained(batch.step)
        if self.rules.run.staleness is not None:
            self.world.tell_step(batch.step)
        self._happened(StepTrained(batch.step))

    # -- figures -----------------------------------------------------------------------------------------------

    def _figures(self, warm: int, steps: int) -> TrainingFigures:
        counted = self.batches[warm : warm + steps]
        begin_s = self.batches[warm - 1].trained_s if warm else 0.0
        end_s = counted[-1].trained_s
        paused_s = sum(seconds for at_s, seconds in self._paused_s if begin_s <= at_s < end_s)
        ages = Counter(age for batch in counted for age in batch.ages)
        lengths = [length for batch in self.batches for length in batch.lengths]
        busy_s = _mean(engine.busy_s for engine in self.world.engines.values())
        return TrainingFigures(
            step_s=(end_s - begin_s) / steps,
            tokens=_mean(batch.tokens for batch in counted),
            wait_share=sum(batch.waited_s for batch in counted) / (end_s - begin_s),
            rollout_s=_mean(batch.waited_s for batch in counted) - self._reward_s,
            exposed_s=paused_s / steps,
            ages=dict(sorted(ages.items())),
            wasted_tokens=dict(sorted(self.wasted.items())),
            sampled_tokens=self._ended_tokens,
            sampled_length=_mean(self._started_lengths),
            trained_length=_mean(lengths),
            busy_share=busy_s / self.world.time.now_s,
            batches=tuple(counted),
        )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
