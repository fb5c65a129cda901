"""The snapshot of a cluster: what it counts, against the state it was taken of."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from worlds.core_builders import Stage
from worlds.core_world import new_world

from heddle_dask.core.transitions import EngineState, TrajectoryState


def test_a_snapshot_counts_trajectories_engines_and_hosts() -> None:
    stage = Stage("sticky", overrides=["placement=round-robin"])
    stage.join("E1", "E2", slots=1, kv_tokens=5000)
    stage.add_host("H1", cpus=4)
    stage.submit("a", "b", "c", "d")
    first = stage.generating("a", context=100)
    stage.placed("b")
    stage.placed("c", context=300)
    stage.act("x", "d", cpus=(3, 3))
    stage.act("y", "d", cpus=(3, 3))
    stage.lose("E2")
    taken = stage.controller.snapshot()
    assert [(e.engine_id, e.state) for e in taken.engines] == [
        ("E1", EngineState.READY),
        ("E2", EngineState.LOST),
    ]
    one = taken.engines[0]
    assert (one.slots, one.generating, one.queued, one.kv_capacity_tokens) == (1, 1, 2, 5000)
    assert one.resident_tokens == 500
    (host,) = taken.hosts
    assert (host.cpus, host.free_cpus, host.running, taken.actions_waiting) == (4, 1, 1, 1)
    assert taken.trajectories == {
        TrajectoryState.GENERATING: 1,
        TrajectoryState.QUEUED: 2,
        TrajectoryState.ACTING: 1,
    }
    assert taken.counts() == {
        "alive": 4,
        "not_admitted": 0,
        "generating": 1,
        "queued": 2,
        "next": 0,
        "acting": 1,
        "actions_waiting": 1,
        "actions_without_worker": 0,
        "engines_ready": 1,
        "slots": 1,
        "tool_cpus": 4,
        "late_arrivals": 0,
        "moves": {},
    }
    stage.finish(first, new_tokens=7)
    assert stage.controller.snapshot().sampled_tokens == 7 and taken.sampled_tokens == 0, "it is frozen"


@pytest.mark.parametrize("seed", range(4))
def test_sums_agree_with_a_walk_over_all_trajectories(seed: int) -> None:
    rng = random.Random(seed)
    world = new_world("heddle", rng.choice, seed=seed)
    moves = [
        "join_engine",
        "join_host",
        "submit",
        "request",
        "start",
        "finish",
        "act",
        "predict",
        "lose_engine",
    ]
    for move in rng.choices(moves, k=120):
        if subjects := world.possible(move):
            world.do(move, rng.choice(subjects))
        taken, state = world.stage.controller.snapshot(), world.stage.state
        assert taken.trajectories == Counter(t.state for t in state.trajectories.values())
        counts = taken.counts()
        assert json.loads(json.dumps(counts)) == counts
        assert taken.alive == sum(n for s, n in taken.trajectories.items() if s is not TrajectoryState.SUBMITTED)
        assert sum(e.generating for e in taken.engines) == taken.trajectories.get(TrajectoryState.GENERATING, 0)
        queued = taken.trajectories.get(TrajectoryState.QUEUED, 0)
        assert sum(e.queued for e in taken.engines) == queued
        assert taken.steps_waiting == taken.trajectories.get(TrajectoryState.WAITING, 0)
