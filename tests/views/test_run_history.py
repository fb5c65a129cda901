"""The fold of a session's events against the controller that answered them, after every event."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from worlds.core_world import WORLDS, play, strategies_of

from heddle_dask.core.controller import Controller
from heddle_dask.core.entities import Trajectory
from heddle_dask.core.journal_codec import decode
from heddle_dask.core.transitions import TrajectoryState as State
from heddle_dask.strategies.presets import strategies_of_run
from heddle_dask.views.history.bounded import HistoryLimits
from heddle_dask.views.history.history_pictures import (
    counts_of,
    engines_of,
    moves_of,
    pools_of,
    series_of,
    trajectory_of,
)
from heddle_dask.views.history.phases import ADMISSION, DRIVER, GENERATING, LLM_QUEUE, MIGRATION
from heddle_dask.views.history.run_history import RunHistory

ALL_SEGMENTS = HistoryLimits(segments=1 << 60, ended=None, samples=2048)
JOURNALS = sorted((Path(__file__).parent.parent / "journals").glob("*.jsonl.gz"))
PHASES_OF = {
    State.SUBMITTED: {ADMISSION},
    State.THINKING: {DRIVER},
    State.WAITING: {LLM_QUEUE, MIGRATION},
    State.QUEUED: {LLM_QUEUE},
    State.GENERATING: {GENERATING},
}


def recorded(journal: Path) -> tuple[dict[str, Any], list[Any]]:
    """Facts and lines of a recorded session."""
    with gzip.open(journal, "rt", encoding="utf-8") as file:
        facts, *lines = (json.loads(line) for line in file)
    return facts, lines


def take(history: RunHistory, line: Sequence[Any]) -> None:
    """Have the history take one line of a journal."""
    event, commands = line
    history.take(decode(event), [decode(each) for each in commands])  # type: ignore[arg-type,misc]


def agree(history: RunHistory, controller: Controller) -> None:
    """Every figure that both have is equal."""
    state, taken = controller.state, controller.snapshot()
    alive = {t.trajectory_id: t for t in state.trajectories.values() if t.state is not State.ENDED}
    assert list(history.lanes) == list(alive)
    for name, trajectory in alive.items():
        _lane_agrees(history, name, trajectory)
    counts = counts_of(history)
    assert (counts.live, counts.generated_tokens) == (taken.alive, taken.sampled_tokens)
    assert counts.steps_waiting == taken.steps_waiting
    assert sum(counts.by_phase.values()) == len(alive)
    shown = {engine.engine_id: engine for engine in engines_of(history)}
    for engine in taken.engines:
        if (view := shown.get(engine.engine_id)) is None:
            assert engine.state.value == "lost"
            continue
        assert (view.state, view.slots, view.kv_capacity_tokens) == (
            engine.state.value,
            engine.slots,
            engine.kv_capacity_tokens,
        )
        assert (view.generating, view.queued, view.resident_tokens) == (
            engine.generating,
            engine.queued,
            engine.resident_tokens,
        ), engine.engine_id
    hosts = {h.host_id: (h.cpus, h.free_cpus, h.running) for h in taken.hosts}
    assert hosts == {h.host_id: (h.cpus, h.free_cpus, len(h.running)) for h in history.actions.hosts.values()}
    assert sum(pool.waiting for pool in pools_of(history)) == taken.actions_waiting
    moves = {m.kind: (m.started, m.failed, m.tokens, m.seconds, m.exposed, m.exposed_s) for m in moves_of(history)}
    assert moves == {
        kind: tuple(totals[name] for name in ("started", "failed", "tokens", "seconds", "exposed", "exposed_s"))
        for kind, totals in taken.moves.items()
    }


def _lane_agrees(history: RunHistory, name: str, trajectory: Trajectory) -> None:
    lane = history.lanes[trajectory.trajectory_id]
    # After a step beside which an action was requested, the controller counts its program as thinking.
    if trajectory.state is State.ACTING or (trajectory.state is State.THINKING and trajectory.actions_open):
        assert lane.phase not in {ADMISSION, DRIVER, LLM_QUEUE, GENERATING, MIGRATION}, name
    else:
        assert lane.phase in PHASES_OF[trajectory.state], name
    assert (lane.engine.engine_id if lane.engine else None) == trajectory.counted_on, name
    assert (lane.home.engine_id if lane.home else None) == trajectory.home, name
    assert (lane.steps, lane.generated_tokens) == (trajectory.steps_finished, trajectory.generated_tokens)
    assert lane.context_tokens == trajectory.context_tokens, name
    left = trajectory.remaining_tokens()
    assert lane.expected_remaining_tokens() == left or (left is None and math.isnan(lane.remaining_tokens))


def times_add_up(history: RunHistory) -> None:
    """The seconds of every trajectory add up to its life, and so do its segments."""
    lanes = [*history.lanes.values(), *history.ended_lanes]
    for lane in lanes:
        view = trajectory_of(lane, history.at_s, len(lane.starts_s))
        end_s = history.at_s if view.ended_s is None else view.ended_s
        assert math.isclose(sum(view.seconds), end_s - view.submitted_s, abs_tol=1e-6)
        assert list(view.segment_starts_s) == sorted(view.segment_starts_s)
        ends_s = (*view.segment_starts_s[1:], end_s)
        by_phase = [0.0] * len(view.seconds)
        for start, end, phase in zip(view.segment_starts_s, ends_s, view.segment_phases, strict=True):
            by_phase[phase] += end - start
        if not view.segments_omitted:
            assert by_phase == pytest.approx(view.seconds, abs=1e-6)


@pytest.mark.parametrize("preset", sorted(WORLDS))
@pytest.mark.parametrize("seed", range(4))
def test_the_fold_agrees_with_the_controller_after_every_event(preset: str, seed: int) -> None:
    world = play(preset, seed=seed, moves=300)
    controller = Controller(strategies_of(preset, seed=seed, overrides=()), world.retries)
    history = RunHistory(ALL_SEGMENTS)
    for event_row, command_rows in world.stage.journal:
        event = decode(event_row)
        commands = controller.handle(event)  # type: ignore[arg-type]
        assert len(commands) == len(command_rows)
        history.take(event, commands)  # type: ignore[arg-type]
        agree(history, controller)
    times_add_up(history)
    assert history.events == len(world.stage.journal) > 60


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda path: path.name.partition(".")[0])
def test_the_fold_of_a_live_journal_agrees_with_its_controller(journal: Path) -> None:
    facts, lines = recorded(journal)
    controller = Controller(strategies_of_run(facts))
    history = RunHistory(ALL_SEGMENTS)
    for number, line in enumerate(lines):
        take(history, line)
        controller.handle(decode(line[0]))  # type: ignore[arg-type]
        if number % 50 == 0:
            agree(history, controller)
    agree(history, controller)
    times_add_up(history)
    assert history.ended["completed"] > 0 and history.steps > 100


def test_a_history_is_bounded() -> None:
    _, lines = recorded(JOURNALS[0])
    small = RunHistory(HistoryLimits(segments=8, ended=3, samples=16, sample_interval_s=0.01, lengths=4))
    for line in lines:
        take(small, line)
    assert len(small.ended_lanes) == 3
    kept = [*small.lanes.values(), *small.ended_lanes]
    assert all(len(lane.starts_s) == len(lane.codes) <= 8 for lane in kept)
    assert any(lane.omitted for lane in kept)
    assert len(small.series.at_s) <= 16
    assert all(len(column) == len(small.series.at_s) for column in small.series.columns.values())
    times_add_up(small)
    series = series_of(small)
    assert list(series.at_s) == sorted(series.at_s)
    assert series.ended[-1] == small.ended_count and list(series.ended) == sorted(series.ended)
