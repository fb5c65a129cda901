"""The sample buffer by lists of events, and against brute force over random arrivals, crashes and steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.record_builders import steady
from worlds.training_builders import buffered

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.run_description import STALE, StalenessBound
from heddle_dask.training.buffer_events import (
    FOREIGN,
    NO_VARIANCE,
    BatchFormed,
    BatchTrained,
    BufferedGroup,
    BufferEvent,
    GroupAccepted,
    GroupDropped,
    LineageBegan,
    event_from_body,
    event_to_body,
)
from heddle_dask.training.sample_buffer import BatchRule, BatchWaits, NothingToLearn, SampleBuffer


def make(groups: int = 2, alpha: int = 1, mode: str = "cancel", **options: Any) -> SampleBuffer:
    return SampleBuffer(BatchRule(groups, StalenessBound(alpha, mode, 2 * groups), **options), "a")


def formed(buffer: SampleBuffer) -> tuple[str, ...]:
    buffer.evict()
    batch = buffer.draw()
    assert isinstance(batch, BatchFormed), batch
    buffer.form(batch)
    return batch.group_ids


def causes(events: tuple[BufferEvent, ...]) -> list[tuple[str, str]]:
    return [(e.group_id, e.cause) for e in events if isinstance(e, GroupDropped)]


def test_a_batch_takes_the_oldest_groups():
    buffer = make(alpha=4)
    for name, version in (("x", 1), ("y", 0), ("z", 1), ("w", 0)):
        buffer.offer(buffered(name, version))
    assert formed(buffer) == ("y", "w")
    assert formed(buffer) == ("x", "z")
    assert buffer.draw() == BatchWaits(0, 2)


def test_groups_beyond_the_bound_are_evicted_before_a_batch_is_formed():
    buffer = make(groups=1, alpha=1)
    buffer.offer(buffered("old", 0))
    for step in range(2):
        buffer.offer(buffered(f"new{step}", 0))
        assert formed(buffer) == (("old",), ("new0",))[step]
    assert causes(buffer.evict()) == [("new1", STALE)]
    assert causes(buffer.offer(buffered("late", 0))) == [("late", STALE)]
    assert buffer.counts.dropped_trajectories[STALE] == 4
    assert buffer.counts.staleness == {0: 2, 1: 2}


def test_a_group_without_variance_is_dropped_and_replaced():
    buffer = make(groups=1)
    assert causes(buffer.offer(buffered("g", rewards=(1.0, 1.0)))) == [("g", NO_VARIANCE)]
    assert buffer.draw() == BatchWaits(0, 1)
    buffer.offer(buffered("h"))
    assert formed(buffer) == ("h",)
    assert buffer.counts.share_without_variance == 0.5


def test_after_empty_draws_the_run_ends_with_one_line():
    buffer = make(groups=2, empty_draws=3)
    for number in range(5):
        buffer.offer(buffered(f"g{number}", rewards=(0.0, 0.0)))
    assert buffer.draw() == BatchWaits(0, 2)
    buffer.drop("g5", "math", "too-few-members", (3,))
    with pytest.raises(NothingToLearn, match="of the last 6 groups none had members with different rewards"):
        buffer.draw()


def test_a_group_to_learn_from_begins_the_count_of_empty_draws_anew():
    buffer = make(groups=1, empty_draws=2)
    for number in range(6):
        buffer.offer(buffered(f"g{number}", number // 2, (0.0, float(number % 2))))
        if number % 2:
            assert formed(buffer) == (f"g{number}",)
        else:
            assert isinstance(buffer.draw(), BatchWaits)


def test_pace_waits_for_a_running_group_that_has_its_last_chance():
    buffer = make(groups=1, alpha=1, mode="pace")
    buffer.begin("long", 0)
    buffer.begin("b", 0)
    buffer.offer(buffered("b", 0))
    assert formed(buffer) == ("b",)  # step 2 can still take it
    buffer.offer(buffered("c", 1))
    assert buffer.draw() == BatchWaits(1, 1, ("long",))
    buffer.offer(buffered("long", 0))
    assert formed(buffer) == ("long",)
    assert formed(buffer) == ("c",)


def test_pace_waits_no_longer_for_a_group_that_ended_without_delivery():
    buffer = make(groups=1, alpha=1, mode="pace")
    buffer.begin("long", 0)
    buffer.offer(buffered("b", 0))
    formed(buffer)
    buffer.offer(buffered("c", 1))
    assert isinstance(buffer.draw(), BatchWaits)
    buffer.end("long")
    assert formed(buffer) == ("c",)


def test_pace_does_not_wait_where_a_whole_batch_has_its_last_chance():
    buffer = make(groups=1, alpha=0, mode="pace")
    buffer.begin("long", 0)
    buffer.offer(buffered("b", 0))
    assert formed(buffer) == ("b",)


def test_cancel_takes_what_comes_first():
    buffer = make(groups=1, alpha=0)
    buffer.begin("long", 0)
    buffer.offer(buffered("b", 0))
    assert formed(buffer) == ("b",)


def test_pace_does_not_wait_where_more_groups_run_than_batches_need():
    buffer = make(groups=1, alpha=0, mode="pace", waits_for_oldest=False)
    buffer.begin("long", 0)
    buffer.offer(buffered("b", 0))
    assert formed(buffer) == ("b",)


def test_late_members_come_on_top_of_a_later_batch():
    buffer = make(groups=1, alpha=1)
    buffer.offer(buffered("g", 0, (0.0, 0.0, 1.0)))
    assert formed(buffer) == ("g",)
    earlier = buffer.rewards_of("g")
    assert earlier == (0.0, 0.0, 1.0)
    buffer.offer(buffered("g+1", 0, (1.0,), late_for="g", earlier_rewards=earlier))
    assert buffer.draw() == BatchWaits(0, 1)
    buffer.offer(buffered("h", 1))
    assert formed(buffer) == ("h", "g+1")
    assert buffer.rewards_of("g") == (0.0, 0.0, 1.0, 1.0)


def test_late_members_of_a_group_without_variance_may_bring_it():
    buffer = make(groups=1)
    buffer.offer(buffered("g", 0, (0.0, 0.0)))
    late = buffered("g+1", 0, (1.0,), late_for="g", earlier_rewards=buffer.rewards_of("g"))
    assert buffer.offer(late) == (GroupAccepted(late),)


def test_a_group_is_taken_once_however_often_it_is_delivered():
    buffer = make(groups=1)
    assert buffer.offer(buffered("g")) == (GroupAccepted(buffered("g")),)
    assert buffer.offer(buffered("g")) == ()
    assert formed(buffer) == ("g",)
    assert buffer.offer(buffered("g")) == ()
    assert isinstance(buffer.draw(), BatchWaits)


def test_groups_of_long_ago_are_forgotten_when_they_would_be_too_old_in_any_case():
    buffer = make(groups=1, alpha=1)
    for number in range(30):
        buffer.offer(buffered(f"g{number}", number))
        buffer.offer(buffered(f"extra{number}", number))  # evicted when it is too old
        formed(buffer)
        buffer.trained(buffer.next_step - 1)
    assert not buffer.knows("g20") and buffer.knows("g29")
    assert len(buffer._since) < 15 and len(buffer._rewards) < 15
    assert causes(buffer.offer(buffered("g20", 20))) == [("g20", "stale")]


def test_a_batch_is_open_until_its_step_is_in_a_checkpoint():
    buffer = make(groups=1, alpha=4)
    for name in "gh":
        buffer.offer(buffered(name))
        formed(buffer)
    assert [batch.step for batch in buffer.open_batches] == [1, 2]
    assert buffer.trained(1) == (BatchTrained(1),)
    assert [batch.step for batch in buffer.open_batches] == [2]
    with pytest.raises(BadInput, match="checkpoint of step 3, but the sample buffer has formed 2 batches"):
        buffer.trained(3)


def test_a_resume_from_an_older_checkpoint_gives_later_batches_again():
    buffer = make(groups=1, alpha=4)
    for number in range(3):
        buffer.offer(buffered(f"g{number}", number))
        formed(buffer)
        buffer.trained(number + 1)
    buffer.offer(buffered("by-undone-weights", 3))
    buffer.offer(buffered("by-kept-weights", 1))
    with pytest.raises(BadInput, match="resume it under a new lineage"):
        buffer.resume(PolicyVersion("a", 1))
    assert buffer.resume(PolicyVersion("b", 1)) == (LineageBegan("b", 1),)
    assert [batch.group_ids for batch in buffer.open_batches] == [("g1",), ("g2",)]
    assert causes(buffer.evict()) == [("by-undone-weights", FOREIGN)]
    buffer.trained(3)
    assert formed(buffer) == ("by-kept-weights",)
    with pytest.raises(BadInput, match="'a' was left before"):
        buffer.resume(PolicyVersion("a", 4))


def test_a_resume_from_a_newer_checkpoint_than_the_log_knows_consumes_its_batch():
    buffer = make(groups=1)
    buffer.offer(buffered("g"))
    formed(buffer)
    assert buffer.resume(PolicyVersion("b", 1)) == (BatchTrained(1), LineageBegan("b", 1))
    assert buffer.open_batches == ()
    assert buffer.version == PolicyVersion("b", 1)


def test_a_batch_that_no_number_of_groups_fills_is_refused():
    with pytest.raises(BadInput, match="30 trajectories cannot be made of groups of 8: use 24 or 32"):
        BatchRule.of(StalenessBound(1, "cancel", 30), 8)
    with pytest.raises(BadInput, match="of 4 trajectories cannot be made of groups of 8: use 8"):
        BatchRule.of(StalenessBound(1, "cancel", 4), 8)
    with pytest.raises(BadInput, match="group size is 1"):
        BatchRule.of(StalenessBound(1, "cancel", 4), 1)
    assert BatchRule.of(StalenessBound(1, "cancel", 32), 8).groups == 4


def test_credits_count_what_waits_or_was_taken_and_not_what_was_dropped():
    buffer = make(groups=1, alpha=0)
    buffer.offer(buffered("g", rewards=(0.0, 1.0, 1.0)))
    buffer.offer(buffered("same", rewards=(0.0, 0.0)))
    buffer.offer(buffered("h"))
    assert buffer.accepted_trajectories == 5
    formed(buffer)
    buffer.evict()  # h is too old for step 2
    assert buffer.accepted_trajectories == 3


# Random worlds. A world steps through arrivals, draws, checkpoints, resumes and crashes; the model below keeps every
# group that was ever accepted, and checks each batch by looking at all of them.


@dataclass
class Model:
    buffer: SampleBuffer
    rule: BatchRule
    log: list[BufferEvent] = field(default_factory=list)
    accepted: dict[str, BufferedGroup] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)  # of accepted groups: in which batch, or why dropped
    given: dict[int, tuple[str, ...]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    numbers: int = 0
    trained: int = 0
    lineages: int = 0

    def take(self, events: tuple[BufferEvent, ...]) -> None:
        self.log += events
        for event in events:
            match event:
                case GroupAccepted(group):
                    self.accepted[group.group_id] = group
                case GroupDropped(group_id=name, cause=cause) if name in self.accepted:
                    assert name not in self.left
                    self.left[name] = cause

    def waiting(self) -> list[BufferedGroup]:
        return [g for name, g in self.accepted.items() if name not in self.left]

    def start(self, version: int) -> None:
        name = f"g{self.numbers}"
        self.numbers += 1
        self.running[name] = version
        self.buffer.begin(name, version)

    def arrive(self, pick: int, rewards: tuple[float, ...]) -> None:
        if self.running:
            name = sorted(self.running)[pick % len(self.running)]
            version = self.running.pop(name)
            lineage = self.buffer.version.lineage
            self.take(self.buffer.offer(buffered(name, version, rewards, lineage)))

    def draw(self) -> None:
        self.take(self.buffer.evict())
        n, alpha = self.buffer.next_step - 1, self.rule.bound.alpha
        waiting = self.waiting()
        assert all(n - group.first_version <= alpha for group in waiting)
        batch = self.buffer.draw()
        if isinstance(batch, BatchWaits):
            assert len(waiting) < self.rule.groups or self.must_wait(waiting)
            return
        assert self.rule.bound.mode == "cancel" or not self.must_wait(waiting)
        chosen = [self.accepted[name] for name in batch.group_ids]
        assert len(chosen) == self.rule.groups
        arrivals = {name: number for number, name in enumerate(self.accepted)}
        ages = [(g.first_version, arrivals[g.group_id]) for g in chosen]
        assert ages == sorted((g.first_version, arrivals[g.group_id]) for g in waiting)[: len(ages)]
        for group in chosen:
            assert group.group_id not in self.left  # taken once, and not after it was dropped
            assert n - group.first_version <= alpha
            self.left[group.group_id] = f"batch {batch.step}"
        assert batch.step not in self.given
        self.given[batch.step] = batch.group_ids
        self.take(self.buffer.form(batch))

    def must_wait(self, waiting: list[BufferedGroup]) -> bool:
        """Brute force: without a further end, does taking the oldest now cost a running group that could be taken?

        Later batches take the oldest, as if everything finished at once.
        """
        if self.rule.bound.mode == "cancel":
            return False
        n, alpha, size = self.buffer.next_step - 1, self.rule.bound.alpha, self.rule.groups
        running = [version for version in self.running.values() if n - version <= alpha]

        def lost(taken: list[int], left: list[int]) -> int:
            left = sorted(left)
            for later in range(n + 1, n + alpha + 2):
                left, stale = [v for v in left if later - v <= alpha], sum(later - v > alpha for v in left)
                if stale:
                    return stale
                left = left[size:]
            return 0

        finished = sorted(group.first_version for group in waiting)
        everything = sorted(finished + running)
        now = lost(finished[:size], finished[size:] + running)
        best = lost(everything[:size], everything[size:])
        return bool(running) and now > best

    def train(self) -> None:
        if self.buffer.open_batches:
            step = self.buffer.open_batches[0].step
            assert step == self.trained + 1
            self.trained = step
            self.take(self.buffer.trained(step))

    def resume(self, back: int) -> None:
        number = max(0, self.trained - back)
        self.lineages += 1
        self.take(self.buffer.resume(PolicyVersion(f"l{self.lineages}", number)))
        self.trained = number
        self.running.clear()
        for name in self.buffer.running:
            self.buffer.end(name)

    def crash(self) -> None:
        """All that is left is the log, in the form in which it is stored."""
        stored = [event_to_body(event) for event in self.log]
        before = self.buffer
        self.buffer = SampleBuffer.replayed(self.rule, "a", [event_from_body(*entry) for entry in stored])
        self.running.clear()
        assert self.buffer.waiting == before.waiting
        assert self.buffer.open_batches == before.open_batches
        assert self.buffer.counts == before.counts
        assert self.buffer.version == before.version
        assert self.buffer.accepted_trajectories == before.accepted_trajectories

    def check(self) -> None:
        assert {g.group_id for g in self.buffer.waiting} == {g.group_id for g in self.waiting()}  # nothing is lost
        expected = [(s, self.given[s]) for s in sorted(self.given) if s > self.trained]
        assert [(b.step, b.group_ids) for b in self.buffer.open_batches] == expected  # unchanged
        in_use = [name for name, why in self.left.items() if why.startswith("batch")]
        in_use += [group.group_id for group in self.waiting()]
        assert self.buffer.accepted_trajectories == sum(len(self.accepted[name].rewards) for name in in_use)


moves = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 2)),
    st.tuples(st.just("arrive"), st.integers(0, 9), st.sampled_from([(0.0, 1.0), (1.0, 1.0), (0.5, 0.0, 1.0)])),
    st.tuples(st.just("draw")),
    st.tuples(st.just("train")),
    st.tuples(st.just("crash")),
    st.tuples(st.just("resume"), st.integers(0, 2)),
)


@steady
@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["cancel", "pace"]),
    st.lists(moves, min_size=10, max_size=60),
)
def test_random_worlds(groups, alpha, mode, story):
    rule = BatchRule(groups, StalenessBound(alpha, mode, groups), empty_draws=1000)
    model = Model(SampleBuffer(rule, "a"), rule)
    for name, *values in story:
        if name == "start":
            model.start(max(0, model.trained - values[0]))  # engines lag behind the trainer
        else:
            getattr(model, name)(*values)
        model.check()


@steady
@given(st.integers(1, 2), st.integers(0, 3), st.lists(st.integers(-3, 6), min_size=60, max_size=60))
def test_with_credits_pace_evicts_nothing(groups, alpha, speeds):
    """Speeds are drawn; the engines have the newest weights, and admission keeps the credits."""
    bound = StalenessBound(alpha, "pace", 2 * groups)
    buffer = SampleBuffer(BatchRule(groups, bound), "a")
    running: dict[str, int] = {}
    started = 0
    for pick in speeds:
        n = buffer.version.number
        while bound.credits(n, buffer.accepted_trajectories, 2 * len(running)) > 0:
            running[f"g{started}"] = n
            buffer.begin(f"g{started}", n)
            started += 1
        if pick >= 0:
            name = sorted(running, key=lambda name: int(name[1:]))[pick % len(running)]
            buffer.offer(buffered(name, running.pop(name)))
        assert buffer.evict() == ()
        batch = buffer.draw()
        if isinstance(batch, BatchFormed):
            buffer.form(batch)
            buffer.trained(batch.step)
        assert running or isinstance(batch, BatchFormed)
    assert not buffer.counts.dropped_groups
