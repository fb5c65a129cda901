"""Random histories of hosts, loads, evictions and failures: accounts balance, and every request ends."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Stage
from worlds.service_world import WEIGHTS, play_services, random_services

from heddle_dask.core.journal_codec import replay


@pytest.mark.parametrize("strategy", ["fcfs-minimum", "elastic,order=fcfs", "elastic,order=tail"])
def test_long_histories_come_to_their_end_and_replay(strategy: str) -> None:
    seen: Counter[str] = Counter()
    overrides = [f"actions={strategy}"]
    for seed in range(6):
        world = random_services(seed, 600, overrides)
        seen += world.seen
        retries = world.stage.controller.retries
        fresh = Stage("least-load", retries=retries, overrides=overrides).controller
        assert not list(replay(fresh, world.stage.journal))
    for what in ("LoadService", "EvictService", "DropServiceCopy", "AbortAction", "ReleaseHost"):
        assert seen[what], what
    for what in ("cold", "restored", "joined a batch", "ran beside a load", "given up"):
        assert seen[what], what


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_drawn_histories_keep_the_accounts(data: st.DataObject) -> None:
    moves = data.draw(st.lists(st.sampled_from(list(WEIGHTS)), max_size=40))
    losses = data.draw(st.integers(0, 2))
    play_services(lambda options: data.draw(st.sampled_from(list(options))), ["join", "submit", *moves], losses)
