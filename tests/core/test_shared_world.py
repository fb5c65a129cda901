"""Runs come and go in a random world: every command and every state is checked, and the journal replays."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from worlds.core_world import WORLDS
from worlds.shared_world import play_shared, shared_controller

from heddle_dask.core.journal_codec import replay
from heddle_dask.core.run_description import RunDescription


@pytest.mark.parametrize("preset", WORLDS)
def test_runs_that_share_a_random_world_come_to_their_end(preset: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(12 if preset == "heddle" else 6):  # a recall is rare
        world = play_shared(preset, seed=2000 + seed, moves=400)
        seen += world.seen
        lines = json.loads(json.dumps(world.stage.journal))
        seen += Counter(line[0][0] for line in lines)
        first = RunDescription(strategy=preset, seed=2000 + seed, retries=world.retries)
        assert list(replay(shared_controller(first), lines)) == []
    assert seen["RunStarted"] > 10 and seen["RunEnded"] > 10
