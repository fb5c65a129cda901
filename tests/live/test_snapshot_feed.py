"""The feed of pictures and the metrics made of them: one per interval, and none that a scheduler could trip over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from worlds.live_session import first_session

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId, GroupId, HostId, StepId, TrajectoryId
from heddle_dask.core.nouns import EngineDescription, HostDescription, TrajectorySpec
from heddle_dask.core.resources import Resources
from heddle_dask.core.run_description import RunDescription
from heddle_dask.live.scheduler import metrics
from heddle_dask.live.scheduler.engine_registry import EngineRegistry
from heddle_dask.live.scheduler.snapshot_feed import SnapshotFeed
from heddle_dask.live.wire.driver_messages import ReadyEngine


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def engine(name: str, slots: int = 4) -> EngineDescription:
    return EngineDescription(EngineId(name), slots, 4096, kv_capacity_tokens=1000)


def samples() -> dict[tuple[str, ...], float]:
    """What a scrape of this process gives of ours."""
    families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("heddle_")
    }


@pytest.fixture
def feed() -> Iterator[SnapshotFeed]:
    made = SnapshotFeed(EngineRegistry(), interval_s=1.0, clock_s=Clock())
    yield made
    metrics.withdraw(made)


def test_one_picture_per_interval_whoever_asks(feed: SnapshotFeed) -> None:
    clock: Any = feed._clock_s
    watched = feed.watch("s", "heddle", lambda: 5.0)
    watched.take(ev.EngineJoined(1.0, engine("a")), [])
    first = feed.latest()
    assert (first.journal_offset, first.session, first.is_open, first.now_s) == (1, "s", True, 5.0)
    watched.take(ev.EngineJoined(2.0, engine("b")), [])
    assert feed.latest() is first and feed.latest_json() is feed.latest_json()
    assert feed.taken == 1
    clock.now_s += 1.0
    second = feed.latest()
    assert (second.journal_offset, len(second.engines), feed.taken) == (2, 2, 2)
    assert feed.latest_json()["journal_offset"] == 2
    assert len(first.engines) == 1, "a picture is frozen"


def test_without_a_session_the_registry_is_shown(feed: SnapshotFeed) -> None:
    clock: Any = feed._clock_s
    registry = feed._registry
    registry.add_engine("tcp://w", ReadyEngine(engine("a"), "emulated", "model"))
    registry.add_host("tcp://w", HostDescription(HostId("h"), Resources.of(cpus=8)))
    before = feed.latest()
    assert (before.session, before.is_open, before.journal_offset) == ("", False, 0)
    assert [(e.engine_id, e.slots, e.seat) for e in before.engines] == [("a", 4, 0)]
    assert [(p.pool, p.cpus, p.free_cpus) for p in before.pools] == [("cpu", 8, 8)]
    watched = feed.watch("s", "heddle", lambda: 7.0)
    watched.take(ev.EngineJoined(0.0, engine("a")), [])
    watched.take(ev.TrajectorySubmitted(1.0, TrajectorySpec(TrajectoryId("t"), GroupId("g"))), [])
    watched.close()
    clock.now_s += 60.0
    after = feed.latest()
    assert (after.session, after.is_open, after.now_s, after.counts.submitted) == ("s", False, 7.0, 1)
    assert [(e.engine_id, e.index) for e in after.engines] == [("a", 0)]


def test_a_defect_of_the_history_does_not_stop_the_session(
    feed: SnapshotFeed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        lone = first_session(RunDescription(strategy="least-load"))
        session, control = lone.session, lone.control
        control.watched = feed.watch("s", "heddle", session.now)
        lone.feed(ev.EngineJoined(session.now(), engine("a")))
        monkeypatch.setattr(control.watched.history, "take", lambda *_: 1 / 0)
        for name in ("b", "c"):
            lone.feed(ev.EngineJoined(session.now(), engine(name)))
        assert len(session.controller.state.engines) == 3
        assert len((await session.updates(0.0)).journal) == 1 + 3

    with caplog.at_level(logging.ERROR):
        asyncio.run(body())
    assert sum("the history of session s stops" in record.message for record in caplog.records) == 1
    picture = feed.latest()
    assert (picture.journal_offset, picture.lines_missing, len(picture.engines)) == (3, 2, 1)


def test_metrics_are_those_of_the_latest_scheduler_and_go_with_it(feed: SnapshotFeed) -> None:
    other = SnapshotFeed(EngineRegistry())
    assert not samples()
    assert metrics.export(feed) and metrics.export(other)
    try:
        other.watch("other", "heddle", lambda: 1.0).take(ev.EngineJoined(0.5, engine("a", slots=9)), [])
        assert samples()["heddle_engine_slots", "0"] == 9
        metrics.withdraw(other)
        feed.watch("s", "heddle", lambda: 1.0).take(ev.EngineJoined(0.5, engine("a", slots=3)), [])
        assert samples()["heddle_engine_slots", "0"] == 3
    finally:
        metrics.withdraw(other)
    metrics.withdraw(feed)
    metrics.withdraw(feed)
    assert not samples()


def test_a_defect_hides_our_metrics_and_no_others(
    feed: SnapshotFeed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.export(feed)
    assert samples()["heddle_session_open",] == 0
    monkeypatch.setattr(feed, "latest", lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        assert "python_gc" in generate_latest(REGISTRY).decode() and not samples()
    assert "are missing in this scrape" in caplog.text


def test_rewards_are_metrics_of_the_run_by_name(feed: SnapshotFeed) -> None:
    metrics.export(feed)
    watched = feed.watch("s", "heddle", lambda: 1.0, "math-seed0", "math")
    assert not [key for key in samples() if key[0].startswith("heddle_reward")]
    for number in range(4):
        name = TrajectoryId(f"t{number}")
        watched.take(ev.TrajectorySubmitted(1.0, TrajectorySpec(name, GroupId(f"g{number % 2}"))), [])
        watched.history.tell_end(name, "", float(number % 2) if number else None)
        watched.take(ev.TrajectoryEnded(2.0, name, "completed"), [])
    feed._clock_s.now_s += 2  # type: ignore[attr-defined]
    found = {key[0]: value for key, value in samples().items() if key[1:] == ("math-seed0",)}
    assert found.pop("heddle_reward_spread") == pytest.approx(8**0.5 / 6)
    assert found == {
        "heddle_rewards_total": 3,
        "heddle_reward_mean": pytest.approx(2 / 3),
        "heddle_reward_solved_share": pytest.approx(2 / 3),
        "heddle_reward_flat_group_share": 1.0,
    }


def test_labels_are_bounded(feed: SnapshotFeed) -> None:
    metrics.export(feed)
    watched = feed.watch("s", "heddle", lambda: 1.0)
    for number in range(300):  # engines that die one after another, each for a reason of its own
        watched.take(ev.EngineJoined(number, engine(f"e{number}")), [])
        watched.take(ev.EngineLost(number, EngineId(f"e{number}"), f"Signal of host{number:x}!", True), [])
        name = TrajectoryId(f"t{number}")
        watched.take(ev.TrajectorySubmitted(number, TrajectorySpec(name, GroupId("g"))), [])
        watched.history.tell_end(name, "agent", None)
        watched.take(ev.TrajectoryEnded(number, name, "failed"), [])
        step = cmd.GiveUpStep(StepId(name, 0, 0), f"{'very ' * number} long cause")
        watched.take(ev.StepCancelled(number, step.step_id), [step])
    for number in range(100):
        watched.take(ev.EngineJoined(300.0, engine(f"f{number}")), [])
    found = samples()
    seats = {labels[1] for labels in found if labels[0] == "heddle_engine_slots"}
    assert seats == {str(seat) for seat in range(metrics.MOST_ENGINES)}
    assert found["heddle_engines", "ready"] == 100
    assert found["heddle_failures_total", "trajectory", "failed by agent"] == 300
    assert found["heddle_failures_total", "engine", "other"] == 300
    assert len(found) < 600
    picture = feed.latest()
    assert len(picture.failures) <= 110 and len(picture.engines) <= 100 + 65
    assert len(picture.series.engines) <= 64
