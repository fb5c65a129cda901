"""An engine that joins in the middle of a rollout does its share of what remains, whatever the preset."""

from __future__ import annotations

import pytest

from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.sim.fleet import ControlDelays, SimulatedFaults, SimulatedFleet, equal_engines
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import PRESETS, build_strategies, tell_costs
from heddle_dask.workloads.planned import fit_into_context
from heddle_dask.workloads.synthetic import synthesize

CONTEXT = 8192
JOINS_S = 30.0
PLANS = [
    fit_into_context(plan, token_scale=0.2, tool_scale=0.5, max_context_tokens=CONTEXT)
    for plan in synthesize("coding", prompts=24, samples=4, seed=3)
]


def play(preset: str, slots: int) -> float:
    """Share of the tokens after it has joined that the second of two engines generates."""
    cost = load_profile("qwen3-8b-h100")
    fleet = SimulatedFleet(
        equal_engines(2, cost, slots=slots, max_context_tokens=CONTEXT),
        delays=ControlDelays.measured(6e-3, 4e-3),
        faults=SimulatedFaults(engines_join={1: JOINS_S}),
    )
    oracle = ["predictor=oracle"] if PRESETS[preset]["predictor"] != "none" else []
    strategies = build_strategies(preset, overrides=oracle)
    tell_costs(strategies, fleet.beliefs)
    known = KnownWork({plan.trajectory_id: float(plan.generated_tokens) for plan in PLANS})
    predictor = None if strategies.predictor is None else build_predictor(strategies.predictor, known)
    tokens: dict[EngineId, int] = {}

    def watch(event: ev.Event, _commands: object) -> None:
        if isinstance(event, ev.StepFinished) and event.at > JOINS_S:
            tokens[event.engine_id] = tokens.get(event.engine_id, 0) + event.new_tokens

    SimulatedWorld(strategies, fleet, PLANS, predictor=predictor, watch=watch).run()
    late = tokens.get(fleet.engines[1][0].engine_id, 0)
    return late / sum(tokens.values())


@pytest.mark.parametrize("slots", [8, 256])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_late_engine_has_at_least_half_of_a_fair_share(preset: str, slots: int) -> None:
    assert play(preset, slots) >= 0.25
