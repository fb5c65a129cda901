"""A simulated rollout for the dashboard: the events of a live one, of any size, in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heddle_dask.core.commands import Command
from heddle_dask.core.events import Event
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.from_steps import known_work
from heddle_dask.sim.fleet import SimulatedFaults, SimulatedFleet, equal_engines
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import build_strategies, tell_costs
from heddle_dask.workloads.choice import load_workload

PRESET = "heddle"
# Right within a factor of two for two trajectories in three: what a learned predictor reaches.
OVERRIDES = ("predictor=oracle,error_factor=2",)
MAX_CONTEXT_TOKENS = 32_000

Pair = tuple[Event, Sequence[Command]]


@dataclass(frozen=True, slots=True)
class RunSize:
    """Engines and slots for so many trajectories."""

    trajectories: int
    samples: int
    engines: int
    slots: int
    tool_cpus: int
    kv_tokens: int

    @classmethod
    def of(cls, trajectories: int, live_share: float) -> RunSize:
        """A cluster on which so large a share of the trajectories can be live at once."""
        samples = next(each for each in (16, 10, 5, 4, 2, 1) if trajectories % each == 0)
        engines = max(2, min(64, trajectories // 64))
        slots = max(2, math.ceil(live_share * trajectories / engines))
        return cls(trajectories, samples, engines, slots, max(4, engines * 4), max(80_000, slots * 6_000))


def simulated_run(trajectories: int, seed: int = 0, live_share: float = 0.5) -> list[Pair]:
    """Every event of a rollout with its commands: an engine is lost and some tools fail.

    Parameters
    ----------
    live_share
        Share of the trajectories for which there are slots and KV memory; the others wait for admission.
    """
    size = RunSize.of(trajectories, live_share)
    plans = load_workload(
        "coding",
        trajectories=trajectories,
        samples=size.samples,
        seed=seed,
        max_context_tokens=MAX_CONTEXT_TOKENS,
    )
    cost = replace(load_profile("qwen3-8b-h100"), capacity_tokens=size.kv_tokens)
    fleet = SimulatedFleet(
        equal_engines(size.engines, cost, slots=size.slots, max_context_tokens=MAX_CONTEXT_TOKENS),
        tool_cpus=size.tool_cpus,
        faults=SimulatedFaults(engines_lost={1: 60.0} if size.engines > 2 else {}, tool_failure_share=0.03),
    )
    strategies = build_strategies(PRESET, seed=seed, overrides=OVERRIDES)
    tell_costs(strategies, fleet.beliefs)
    assert strategies.predictor is not None
    pairs: list[Pair] = []
    SimulatedWorld(
        strategies,
        fleet,
        plans,
        predictor=build_predictor(strategies.predictor, known_work(plans)),
        seed=seed,
        watch=lambda event, commands: pairs.append((event, tuple(commands))),
    ).run()
    return pairs
