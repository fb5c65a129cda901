"""``benchmarks decisions``: its world is one that a controller can live in, and its rows cover every event."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from worlds.integrity import check_integrity

from benchmarks.action_decisions import PER_PASS, PER_STARTED
from benchmarks.decisions import FIRST_PLAN, PER_STEP, SteadyWorld, bench_strategies, decisions
from benchmarks.opponents import FIXED
from heddle_dask.core.errors import BadInput

EVENTS = {
    "ActionFinished",
    "ActionRequested",
    "StepFinished",
    "StepRequested",
    "StepStarted",
    "TrajectoryEnded",
    "TrajectorySubmitted",
    FIRST_PLAN,
    PER_STEP,
}


def test_rows_for_every_preset_number_of_engines_and_event() -> None:
    arguments = ["--presets", "heddle,slime", "--engines", "2,3", "--trajectories", "30", "--events", "1500"]
    arguments += ["--actions", f"{FIXED}:units=2,elastic", "--waiting", "40"]
    result = CliRunner().invoke(decisions, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.splitlines()[-1])
    of_actions = [(row["strategy"], row["what"], row["waiting"]) for row in printed["actions"]]
    assert of_actions == [
        (strategy, what, 40) for strategy in (f"{FIXED}:units=2", "elastic") for what in (PER_STARTED, PER_PASS)
    ]
    assert all(row["started"] >= 1 and row["mean_us"] > 0 for row in printed["actions"])
    rows = printed["rows"]
    for preset, more in (("heddle", {"PredictionMade"}), ("slime", set())):
        for engines in (2, 3):
            mine = [row for row in rows if (row["preset"], row["engines"]) == (preset, engines)]
            assert EVENTS | more <= {row["event"] for row in mine}
    for row in rows:
        assert row["count"] >= 1 and row["mean_us"] > 0
        assert row["p50_us"] <= row["p99_us"]


@pytest.mark.parametrize("preset", ["heddle", "heddle-paper"])
def test_the_world_keeps_the_controller_whole_and_full(preset: str) -> None:
    world = SteadyWorld(bench_strategies(preset, 0), trajectories=420, engines=2, seed=1)
    for _ in range(12):
        world.play(400)
        check_integrity(world.controller.state)
        # One that ended may have an action that still runs.
        assert len(world.agents) == 420
    stopped = sum(site.free < 0 or site.free > 100 for site in world.sites.values())
    assert stopped == 0


def test_the_same_seed_plays_the_same_world() -> None:
    def told(seed: int) -> list[tuple[str, str | None]]:
        world = SteadyWorld(bench_strategies("heddle", 0), trajectories=60, engines=3, seed=seed)
        world.play(1500)
        return [(name, t.home) for name, t in world.controller.state.trajectories.items()]

    assert told(1) == told(1) != told(2)


def test_bad_input_is_refused() -> None:
    for arguments in (["--engines", "0"], ["--engines", "x"], ["--presets", "abacus"]):
        result = CliRunner().invoke(decisions, arguments)
        assert isinstance(result.exception, BadInput)
