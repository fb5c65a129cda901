"""A training run in virtual time: source, sample buffer, trainer and weight updates around a simulated cluster."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.rollart.training.rules import TrainingRules
from benchmarks.rollart.training.sample_groups import DrawGroup, SampleGroup, TrainedBatch
from benchmarks.rollart.training.times import TrainingTimes
from benchmarks.rollart.training.world import TrainingWorld
from heddle_dask.core.run_description import REDUNDANT, STALE
from heddle_dask.sim.program import Program
from heddle_dask.training.loop import TrainingLoop
from heddle_dask.training.loop_messages import (
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
    TrainOnBatch,
)

_SLICE_S = 5.0
_MOST_S = 1e6
_STEPS_AFTER = 4


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
        reward_s: float = 0.0,
    ) -> None:
        self.rules = rules
        self.times = times
        self.world: TrainingWorld
        self.loop: TrainingLoop
        self.batches: list[TrainedBatch] = []
        self.wasted: Counter[str] = Counter()
        self._draw = draw
        self._reward_s = reward_s
        # n, and versions that the loop wants on all engines.
        self._trained = 0
        self._switching: list[int] = []
        self._forming = False
        self._formed: list[SampleGroup] = []
        self._idle_since_s = 0.0
        self._running: dict[str, SampleGroup] = {}
        self._buffer: list[SampleGroup] = []
        self._opened = 0
        self._accepted = 0
        self._started = 0
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
        """Submit as many groups as belong to the open batches; the controller starts them when they have credits."""
        rules = self.rules
        held = self._accepted + len(self._buffer) + len(dict.fromkeys(self._running.values()))
        for _ in range(self._opened * rules.groups + rules.more_groups - held):
            self._start_group()

    def _start_group(self) -> None:
        if self._again:
            task, attempt = self._again.pop(0)
        else:
            task, attempt = self._next_task, 0
            self._next_task += 1
        plans = tuple(self._draw(task, attempt))
        group = SampleGroup(task, attempt, plans, self.rules.members, self._started // self.rules.groups)
        self._started += 1
        for plan in plans:
            self._running[plan.trajectory_id] = group
            self._started_lengths.append(plan.generated_tokens)
            self.world.submit(plan)

    # -- sink --------------------------------------------------------------------------------------------------

    def ended(self, program: Program) -> None:
        """A trajectory has ended by itself."""
        name = program.plan.trajectory_id
        group = self._running.pop(name)
        if group.is_dropped:  # its cancellation was under way
            self.wasted[STALE] += program.plan.generated_tokens
            return
        self._ended_tokens += program.plan.generated_tokens
        group.done.append(name)
        if not group.is_complete:
            return
        self._stop_members(group)
        self._buffer.append(group)
        self.world.tell_group(group.group_id, self.rules.members)
        self._try_batch()

    def cancelled(self, program: Program, cause: str, lost_tokens: int) -> None:
        """A trajectory was cancelled: a stale one with its group, and their task is requested again, first of all."""
        name = program.plan.trajectory_id
        self.wasted[cause] += lost_tokens
        group = self._running.pop(name)
        if cause == STALE and not group.is_dropped and not group.is_complete:
            self._drop(group, STALE)
            self._again.append((group.task, group.attempt + 1))
            self.world.tell_group(group.group_id, 0)
            self._request()

    def _stop_members(self, group: SampleGroup) -> None:
        """Members that are not needed are cancelled."""
        for plan in group.plans:
            if plan.trajectory_id in self._running:
                self.world.tell_redundant(plan.trajectory_id)

    def _drop(self, group: SampleGroup, cause: str) -> None:
        """What the finished members of a group have sampled is lost."""
        done = set(group.done)
        group.is_dropped = True
        finished = sum(plan.generated_tokens for plan in group.plans if plan.trajectory_id in done)
        self.wasted[cause] += finished
        self._ended_tokens -= finished

    def _oldest(self, group: SampleGroup) -> int | None:
        """Version of the oldest member; None without a token."""
        first = self.world.first_versions
        known = [first[plan.trajectory_id] for plan in group.plans if plan.trajectory_id in first]
        return min(known, default=None)

    def _drop_stale(self) -> None:
        """Drop groups of the buffer that exceed the bound now; those under way are the controller's."""
        rules = self.rules
        if rules.run.staleness is None or rules.staleness == "pace":
            return
        stale = [group for group in self._buffer if not self._is_valid(group, self._trained)]
        self._buffer = [group for group in self._buffer if group not in stale]
        for group in stale:
            self._drop(group, STALE)
            self._again.append((group.task, group.attempt + 1))
            self.world.tell_group(group.group_id, -rules.members)
        if stale:
            self._request()

    def _is_valid(self, group: SampleGroup, trained: int) -> bool:
        """Whether a batch may have this group after so many steps; one without a token by its place."""
        oldest = self._oldest(group)
        return group.batch >= trained if oldest is None else self.rules.bound.is_valid(trained, oldest)

    # -- trainer -----------------------------------------------------------------------------------------------

    def _try_batch(self) -> None:
        if not self._forming:
            return
        self._drop_stale()
        groups = self._batch()
        if groups is None:
            return
        self._forming = False
        taken = set(map(id, groups))
        self._buffer = [group for group in self._buffer if id(group) not in taken]
        self._accepted += len(groups)
        if self.rules.mode != "async" and not self.rules.keep_losers:
            for group in [*dict.fromkeys(self._running.values()), *self._buffer]:
                self._drop(group, REDUNDANT)
                self._stop_members(group)
            self._buffer.clear()
        self._formed = groups
        self._happened(BatchReady(self._trained + 1))
        self._request()

    def _batch(self) -> list[SampleGroup] | None:
        """The groups of the next batch, oldest first; None while they are not there."""
        rules = self.rules
        if rules.run.staleness is not None and rules.staleness == "pace":
            # What would exceed the bound in the step after this one must be in this batch.
            due = [
                group
                for group in dict.fromkeys((*self._buffer, *self._running.values()))
                if not self._is_valid(group, self._trained + 1)
            ]
            if any(group not in self._buffer for group in due):
                return None
            self._buffer.sort(key=lambda group: group not in due)
        return self._buffer[: rules.groups] if len(self._buffer) >= rules.groups else None

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
            ages=tuple(self._trained - first[plan.trajectory_id] for plan in plans),
            tokens=tokens,
            lengths=tuple(plan.generated_tokens for plan in plans),
            names=tuple(plan.trajectory_id for plan in plans),
        )
        self.world.time.at(batch.trained_s, self._step_ended, batch)

    def _step_ended(self, batch: TrainedBatch) -> None:
        self._trained = batch.step
        self._idle_since_s = self.world.time.now_s
        self.batches.append(batch)
        if self.rules.run.staleness is not None:
            self.world.tell_step(batch.step)
        self._drop_stale()
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
