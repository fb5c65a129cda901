"""Random worlds of training: versions, staleness and credits hold after every event, and the journal replays."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from worlds.core_world import RESTLESS, strategies_of
from worlds.training_world import play_training

from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import replay
from heddle_dask.core.run_description import StalenessBound, StalenessMode, WeightUpdatePolicy

POLICIES = (
    WeightUpdatePolicy(),
    WeightUpdatePolicy("all-at-once", install="when-fetched", max_fetches=2),
    WeightUpdatePolicy(keep_kv=True, install="when-fetched"),
    WeightUpdatePolicy("all-at-once"),
)


@pytest.mark.parametrize("mode", ["cancel", "pace"])
@pytest.mark.parametrize("preset", ["sticky-least-loaded", "heddle", RESTLESS])
def test_random_worlds_of_training_keep_the_bound_and_come_to_their_end(preset: str, mode: StalenessMode) -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        bound = StalenessBound(seed % 3, mode, (1, 2, 4)[seed % 3])
        policy = POLICIES[seed % 4]
        world = play_training(preset, seed=4400 + seed, moves=260, bound=bound, policy=policy)
        seen += world.seen
        lines = json.loads(json.dumps(world.stage.journal))
        seen += Counter(row[0] for line in lines for row in (line[0], *line[1]))
        chosen = strategies_of(preset, seed=4400 + seed, overrides=())
        assert list(replay(Controller(chosen, world.retries), lines)) == []
    assert set(seen) >= {
        "OptimizerStepEnded",
        "WeightsPublished",
        "WeightsFetched",
        "SwitchRequested",
        "WeightsInstalled",
        "GroupEnded",
        "TrajectoryRedundant",
        "FetchWeights",
        "InstallWeights",
        "CancelTrajectory",
        "ActionCancelled",
        "superseded",
        "two install",
        "installs before its first step",
        "fetches an older one",
        "begins behind",
        "fetch failed",
        "install failed",
    }, sorted(seen)
    assert (seen["cancelled: stale"] > 0) == (mode == "cancel")
    assert preset != RESTLESS or seen["transfer under one version"] > 0
