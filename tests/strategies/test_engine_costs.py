"""The costs that strategies plan with: given, told by the engines, or those of a profile."""

from __future__ import annotations

import json
from dataclasses import replace

from worlds.core_builders import Stage, engine_of, trajectory_spec

from heddle_dask.core import events as ev
from heddle_dask.core.commands import AdmitTrajectory
from heddle_dask.core.entities import Engine
from heddle_dask.core.journal_codec import decode, encode
from heddle_dask.core.nouns import EngineDescription, Prediction
from heddle_dask.cost.engine_cost import EngineCost, engine_cost_for, load_profile
from heddle_dask.strategies.engine_costs import EngineCosts
from heddle_dask.strategies.presets import build_strategies

H100 = replace(engine_cost_for("qwen3-8b", "h100"), capacity_tokens=10_000)


def telling(name: str, cost: EngineCost = H100) -> EngineDescription:
    return replace(engine_of(name, slots=1, kv_tokens=10_000), cost=json.dumps(cost.to_mapping()))


def test_what_an_engine_tells_goes_before_the_profile_that_nobody_chose() -> None:
    engine = Engine(telling("A"), 0)
    assert EngineCosts("tiny-cpu").of(engine) == H100
    assert EngineCosts("tiny-cpu").of(Engine(engine_of("B"), 1)) == load_profile("tiny-cpu")
    chosen = EngineCosts("qwen3-32b-h100")
    assert chosen.of(engine).fixed_s == load_profile("qwen3-32b-h100").fixed_s
    given = EngineCosts("tiny-cpu", {1: EngineCost(1.0)})
    assert given.of(engine).fixed_s == 1.0
    assert not chosen.see([engine]) and not given.see([engine])


def test_the_pace_is_that_of_the_engines_that_tell_their_cost() -> None:
    costs = EngineCosts("tiny-cpu")
    assert costs.pace_s == EngineCosts("tiny-cpu").pace_s
    silent, twice = Engine(engine_of("A"), 0), Engine(replace(telling("B", H100.scaled(0.5)), tp_degree=2), 1)
    assert not costs.see([silent])
    assert costs.see([silent, twice]) and costs.pace_s == H100.scaled(0.5).iteration_s(1, 10_000)
    assert costs.see([twice, Engine(telling("C"), 2)]) and costs.pace_s == H100.iteration_s(1, 10_000)
    assert not costs.see([]), "the latest pace stays"


def test_admission_sorts_its_queue_again_when_the_first_engine_tells_its_cost() -> None:
    """Tools count as the tokens that the engine that is there makes meanwhile, not as those of the profile."""
    slow = H100.scaled(100)
    for cost, then in ((H100, "tools"), (slow, "tokens")):
        parts = ["admission=kv-fit,fill=1.0,per_slot=1", "placement=sticky-least-loaded", "predictor=oracle"]
        stage = Stage(strategies=build_strategies("sticky", overrides=parts))
        for name, tokens, tools_s in (("first", 1000.0, 0.0), ("tokens", 300.0, 0.0), ("tools", 50.0, 2.5)):
            stage.feed(ev.TrajectorySubmitted, trajectory_spec(name, 10))
            stage.feed(ev.PredictionMade, name, 0, Prediction(tokens, tokens, "", tools_s, None, 0.0))
        made = stage.feed(ev.EngineJoined, telling("A", cost))
        assert [c.trajectory_id for c in made if isinstance(c, AdmitTrajectory)] == ["first"]
        made = stage.feed(ev.TrajectoryEnded, "first", "completed")
        assert [c.trajectory_id for c in made if isinstance(c, AdmitTrajectory)] == [then]


def test_a_journal_of_before_has_engines_that_tell_nothing() -> None:
    event = ev.EngineJoined(0.0, telling("A"))
    row = encode(event)
    assert decode(row) == event
    (place,) = (at for at, value in enumerate(row) if isinstance(value, list))
    row[place].pop()
    assert decode(row) == ev.EngineJoined(0.0, replace(event.engine, cost=""))
