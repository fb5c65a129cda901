"""Parts of a live training that need no cluster: the intake of samples, rows of metrics and evaluations, trackers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from worlds.training_builders import finished_group, trained_record

from heddle_dask.core.errors import WriteFailed
from heddle_dask.core.events import GroupEnded, OptimizerStepEnded
from heddle_dask.core.ids import FIRST_RUN, EngineId, GroupId, PolicyVersion
from heddle_dask.core.run_description import StalenessBound
from heddle_dask.environments.base import Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.task_sources import EnvironmentSource
from heddle_dask.live.driver.files.run_files import RunFiles
from heddle_dask.live.driver.groups import group_feed
from heddle_dask.live.driver.groups.group_feed import GroupFeed, GroupPort
from heddle_dask.live.training import weight_control
from heddle_dask.live.training.evaluation import evaluation_row
from heddle_dask.live.training.sample_intake import SampleIntake
from heddle_dask.live.training.trackers import TRACKERS, tracked_numbers
from heddle_dask.live.training.training import LiveTraining, TrainingParts
from heddle_dask.live.training.weight_control import NoEngineUpdated, WeightControl
from heddle_dask.live.wire.codec import Message
from heddle_dask.live.wire.envelopes import UNSTAMPED, Report
from heddle_dask.live.wire.training_messages import EngineWeightState, WeightStatus
from heddle_dask.training.batch_files import batch_path, load_batch
from heddle_dask.training.groups import GroupPlan
from heddle_dask.training.json_lines import read_lines
from heddle_dask.training.loop import LoopStart
from heddle_dask.training.plan import plan_of_mode
from heddle_dask.training.run_directory import TrainingDirectory
from heddle_dask.training.sample_buffer import BatchRule
from heddle_dask.training.step_row import StepSeconds, WasteMeter, step_row
from heddle_dask.training.stored_samples import StoredSamples
from heddle_dask.training.trainer import TrainerState, TrainReport


def _samples(folder: Path) -> StoredSamples:
    return StoredSamples.create(folder, BatchRule(2, StalenessBound(1, "cancel", 4)), "a")


def test_a_batch_waits_for_groups_and_is_given_out_again_after_a_crash(tmp_path: Path) -> None:
    async def first_process() -> Path:
        with _samples(tmp_path) as samples:
            intake = SampleIntake(samples, "a")
            waiting = asyncio.create_task(intake.batch(1))
            assert intake.accepts(finished_group("g0"))
            assert not intake.accepts(finished_group("g1", rewards=(1.0, 1.0)))  # no variance: replaced
            assert not intake.accepts(finished_group("g0"))  # it was counted before
            await asyncio.sleep(0)
            assert not waiting.done()
            assert intake.accepts(finished_group("g2"))
            assert intake.counted == 2
            return await waiting

    path = asyncio.run(first_process())
    assert path == batch_path(tmp_path / "batches", 1)
    with StoredSamples.reopen(tmp_path, BatchRule(2, StalenessBound(1, "cancel", 4)), tmp_path / "no-store") as samples:
        again = SampleIntake(samples, "a")
        assert again.counted == 2
        assert asyncio.run(again.batch(1)) == path


def test_what_became_too_old_is_replaced(tmp_path: Path) -> None:
    evicted: list[int] = []
    with _samples(tmp_path) as samples:
        intake = SampleIntake(samples, "a", evicted.append)
        for number in range(5):
            assert intake.accepts(finished_group(f"g{number}", version=0))
        for step in (1, 2):
            asyncio.run(intake.batch(step))
            intake.trained(PolicyVersion("a", step))
        for number in (5, 6):
            assert intake.accepts(finished_group(f"g{number}", version=1))
        third = load_batch(asyncio.run(intake.batch(3)))
        assert intake.counted == 6
    # Batch 3 takes versions 1 and newer: g4 was one too many for the batches before.
    assert [group.group_id for group in third.groups] == ["g5", "g6"]
    assert evicted == [1]


def test_groups_that_become_too_old_before_the_scheduler_is_there_lose_their_credits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed training forms its first batch while its engines start."""
    told: list[Message] = []
    monkeypatch.setattr(group_feed, "send", lambda client, message: told.append(message))
    environment = FunctionEnvironment(None, name="e", tasks=lambda count, seed: [Task("t", "task")])
    feed = GroupFeed(EnvironmentSource(environment, 1), GroupPlan(members=3), 0, counted=2)
    feed.evicted(1)
    driver = Mock()
    driver.failures.quarantined = {}
    port = GroupPort(Mock(status="running"), Mock(session_id="s"), driver)
    feed.connect(port, RunFiles(None, dict, lambda line: None), "", lambda: None)
    assert told == [Report("s", GroupEnded(UNSTAMPED, FIRST_RUN, GroupId("evicted"), -3))]
    feed.evicted(1)
    assert told == [Report("s", GroupEnded(UNSTAMPED, FIRST_RUN, GroupId("evicted"), -3))] * 2
    assert feed.ledger.counted == 0
    driver.cancel.assert_not_called()
    driver.failures.quarantine.assert_not_called()


def test_groups_that_wait_when_a_training_goes_on_keep_their_credits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = BatchRule(2, StalenessBound(1, "cancel", 4))
    with StoredSamples.create(tmp_path, rule, "a") as samples:
        for number in range(6):
            samples.offer(finished_group(f"g{number}", version=number // 3), "a")
        samples.draw()
        samples.trained(1)
        samples.draw()
        samples.offer(finished_group("g5+late", rewards=(0.0,), version=1, late_for="g5"), "a")
        told: list[Message] = []
        monkeypatch.setattr(weight_control, "send", lambda client, message: told.append(message))
        parts = Mock(
            spec=TrainingParts, lineage="a", plan=plan_of_mode("async", steps=9, alpha=1), checkpoint_every_s=0
        )
        parts.intake = SampleIntake(samples, "a")
        parts.control = WeightControl(Mock(), "s", print)
        parts.feed.follow.side_effect = WriteFailed("the rollout has failed")
        parts.feed.wasted_tokens = {}
        parts.directory = TrainingDirectory(tmp_path)
        with pytest.raises(WriteFailed):
            asyncio.run(LiveTraining(parts, LoopStart(1, frozenset())).run())
    # Two groups are in a batch, and two wait; what is late is beyond a batch.
    assert told[:2] == [
        Report("s", OptimizerStepEnded(UNSTAMPED, FIRST_RUN, PolicyVersion("a", 1))),
        Report("s", GroupEnded(UNSTAMPED, FIRST_RUN, GroupId("resumed"), 8)),
    ]


@pytest.mark.parametrize(
    ("states", "ends", "said"),
    [
        # (engine, installed, state) at each poll, the last one for ever
        ([["a 1 current", "b 1 current"], ["a 2 current", "b 1 fetching"]], True, "engine b has not taken weights"),
        ([["a 1 current", "b 1 installing"]], False, "no engine has taken weights a:2 for 0 s"),
        ([[], ["a 2 current"]], True, "no engine is there for 0 s to take weights a:2"),
    ],
)
def test_a_switch_goes_on_without_an_engine_that_does_not_finish(
    states: list[list[str]], ends: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(engines: list[str]) -> WeightStatus:
        given = (one.split() for one in engines)
        return WeightStatus(
            tuple(EngineWeightState(EngineId(name), PolicyVersion("a", int(n)), None, how) for name, n, how in given)
        )

    notes: list[str] = []
    control = WeightControl(Mock(), "s", notes.append, limit_s=0.0)
    polls = [status(each) for each in states]

    async def next_status() -> WeightStatus:
        return polls.pop(0) if len(polls) > 1 else polls[0]

    monkeypatch.setattr(weight_control, "send", lambda client, message: None)
    monkeypatch.setattr(weight_control, "POLL_S", 0.0)
    monkeypatch.setattr(control, "status", next_status)
    switching = control.switch(PolicyVersion("a", 2))
    if not ends:
        with pytest.raises(NoEngineUpdated, match=said):
            asyncio.run(switching)
        return
    asyncio.run(switching)
    assert len([note for note in notes if said in note]) == 1


class Overlapping:
    """A trainer whose publications end when the next batch is being trained."""

    def __init__(self) -> None:
        self.number = 0
        self.log: list[str] = []
        self.training = asyncio.Event()

    async def state(self) -> TrainerState:
        return TrainerState(PolicyVersion("a", self.number), None, max(0, self.number - 1))

    async def train(self, batch: Path, version: PolicyVersion) -> TrainReport:
        self.log.append(f"train {version.number}")
        self.training.set()
        await asyncio.sleep(0)
        self.number = version.number
        return TrainReport(await self.state(), {"loss": 0.5}, {"train": 1.0})

    async def publish(
        self, version: PolicyVersion, store: str, copied: Callable[[], None] = print, *, evaluated: bool = False
    ) -> str | None:
        self.log.append(f"publish {version.number}")
        self.training.clear()
        copied()
        if version.number < 3:
            await self.training.wait()
        self.log.append(f"published {version.number}")
        return store

    async def keep_best(self, version: PolicyVersion, reward: float) -> None:
        raise AssertionError("nothing is evaluated")

    async def save(self, version: PolicyVersion) -> TrainerState:
        self.log.append(f"save {version.number}")
        return await self.state()

    async def close(self) -> None:
        pass


def test_a_training_goes_on_while_weights_are_published_and_forgets_batches(tmp_path: Path) -> None:
    trainer = Overlapping()
    parts = Mock(spec=TrainingParts, lineage="a", plan=plan_of_mode("async", steps=3, alpha=3), trainer=trainer)
    parts.evaluation, parts.trackers, parts.decode, parts.checkpoint_every_s = None, (), str, 0.0
    parts.mismatch.judge.return_value = ""
    parts.directory = TrainingDirectory(tmp_path)
    parts.store.manifest.return_value = None
    parts.feed.follow = AsyncMock(side_effect=asyncio.Event().wait)
    parts.feed.wasted_tokens, parts.feed.mix_sampled, parts.feed.generated_tokens = {}, {}, 0
    for name in ("switch", "in_use"):
        setattr(parts.control, name, AsyncMock(return_value=set()))
    with StoredSamples.create(tmp_path, BatchRule(1, StalenessBound(3, "cancel", 2)), "a") as samples:
        parts.intake = SampleIntake(samples, "a")
        for number in range(3):
            parts.intake.accepts(finished_group(f"g{number}"))
        ended = asyncio.run(LiveTraining(parts, LoopStart()).run())
    assert (ended.trained, ended.stopped) == (3, False)
    assert trainer.log[:4] == ["train 1", "publish 1", "train 2", "published 1"]
    assert trainer.log[-1] == "save 3"
    assert [row["step"] for row in read_lines(parts.directory.metrics)] == [1, 2, 3]
    assert [path.name for path in (tmp_path / "batches").iterdir()] == ["step-000003.npz"]


def test_a_row_says_what_a_step_was_trained_on(tmp_path: Path) -> None:
    with _samples(tmp_path) as samples:
        intake = SampleIntake(samples, "a")
        waste = WasteMeter()
        waste.skip(intake.counts, {})
        for name, rewards in (("g0", (0.0, 1.0)), ("g1", (1.0, 1.0)), ("g2", (0.0, 0.5))):
            intake.accepts(finished_group(name, rewards))
        batch = load_batch(asyncio.run(intake.batch(1)))
        row = step_row(
            batch,
            TrainReport(TrainerState(PolicyVersion("a", 1)), {"loss": 0.5}, {"train": 1.0}),
            intake.counts,
            wasted_tokens=waste.take(intake.counts, {"redundant": 3}),
            mix_sampled={"math": 3, "code": 1},
            seconds=StepSeconds(train=1.0),
            elapsed_s=2.0,
            generated_tokens=24,
            held_out=None,
        )
        texts = intake.texts(batch, lambda tokens: " ".join(map(str, tokens)))
    assert (row["reward"], row["samples"], row["groups"]) == (0.375, 4, 2)
    assert row["staleness"] == {"0": 4}
    assert row["wasted_tokens"] == {"no-variance": 8, "redundant": 3}
    assert row["mix_sampled"] == {"math": 0.75, "code": 0.25}
    assert row["mix_consumed"] == {"math": 1.0}
    assert row["tokens_per_s"] == 12.0
    assert [text["trajectory_id"] for text in texts] == ["g0/0", "g2/0"]
    assert texts[0]["text"].startswith("1 2 3 10")


def test_an_evaluation_is_of_tasks_and_names_its_versions() -> None:
    records = [
        trained_record(f"{task}/{sample}", task, reward, (3,))
        for task, rewards in (("t0", (0.0, 1.0)), ("t1", (1.0, None)))
        for sample, reward in enumerate(rewards)
    ]
    row = evaluation_row(PolicyVersion("a", 3), {"math": records})
    assert row["rewards"] == {"math/task-of-t0": 0.5, "math/task-of-t1": 1.0}
    assert (row["reward"], row["tasks"], row["without_reward"]) == (0.75, 2, 1)
    assert row["tokens_by_version"] == {"3": 16}
    nothing = evaluation_row(PolicyVersion("a", 3), {"math": [replace(records[0], reward=None)]})
    assert nothing["reward"] is None


def test_numbers_of_a_row_have_names_of_their_own() -> None:
    row = {"step": 3, "lineage": "a", "held_out_reward": None, "seconds": {"train": 1.5}, "done": True}
    assert tracked_numbers(row) == {"step": 3.0, "seconds/train": 1.5}


def test_tensorboard_reads_what_is_reported(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = TRACKERS["tensorboard"](tmp_path, {})
    tracker.log(1, {"reward": 0.25})
    tracker.log(2, {"reward": 0.75})
    tracker.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("reward")] == [(1, 0.25), (2, 0.75)]
