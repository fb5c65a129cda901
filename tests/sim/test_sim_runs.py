"""Several runs in one simulated world: shares by weight while both are saturated, and lent while one is not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from worlds.integrity import check_integrity

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.ids import RunId
from heddle_dask.core.journal_codec import encode, replay
from heddle_dask.core.run_record import plain_name
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.sim.fleet import ControlDelays, SimulatedFleet, equal_engines
from heddle_dask.sim.runs import SimulatedRun, strategies_builder
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import build_strategies, tell_costs
from heddle_dask.workloads.planned import PlannedTrajectory, fit_into_context
from heddle_dask.workloads.synthetic import synthesize

CONTEXT = 4096
SATURATED = 6
"""A run with so many steps that are held back has some at each of the two engines."""


def plans_of(seed: int, prompts: int = 40, kind: str = "coding") -> list[PlannedTrajectory]:
    return [
        fit_into_context(plan, token_scale=0.05, tool_scale=0.2, max_context_tokens=CONTEXT)
        for plan in synthesize(kind, prompts=prompts, samples=4, seed=seed)
    ]


class Watched:
    """A world of two runs, and the tokens of each while steps of both are held back: then both are saturated."""

    def __init__(self, first: str, other: str, weights: tuple[float, float], *, starts_s: float = 0.0) -> None:
        cost = replace(load_profile("qwen3-8b-h100"), capacity_tokens=60_000)
        self.fleet = SimulatedFleet(
            equal_engines(2, cost, slots=8, max_context_tokens=CONTEXT),
            delays=ControlDelays.measured(2e-3, 2e-3),
            tool_cpus=64,
        )
        plans = plans_of(1)
        self.first = build_strategies(first)
        tell_costs(self.first, self.fleet.beliefs)
        self.run = SimulatedRun(
            other,
            plans,  # the same ids as in the first run
            weights[1],
            predictor=_oracle(other, plans, "@2"),
            starts_s=starts_s,
        )
        self.tokens: Counter[str] = Counter()
        self.ended_at_s: dict[RunId, float] = {}
        self.alone_tokens = 0
        self.journal: list[object] = []
        self.world = SimulatedWorld(
            self.first,
            self.fleet,
            plans,
            predictor=_oracle(first, plans, ""),
            weight=weights[0],
            others=(self.run,),
            watch=self.watch,
        )
        self.world.run()

    def watch(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        self.journal.append([encode(event), [encode(command) for command in commands]])
        state = self.world.controller.state
        if len(self.journal) % 50 == 0:
            check_integrity(state)
        if isinstance(event, ev.StepFinished):
            run_id, _ = plain_name(event.step_id.trajectory_id)
            if len(state.runs) == 2 and all(run.held >= SATURATED for run in state.runs.values()):
                self.tokens[run_id] += event.new_tokens
        if isinstance(event, ev.TrajectoryEnded):
            self.ended_at_s[plain_name(event.trajectory_id)[0]] = event.at


def _oracle(preset: str, plans: Sequence[PlannedTrajectory], suffix: str) -> object:
    choice = build_strategies(preset).predictor
    known = {plan.trajectory_id + suffix: float(plan.generated_tokens) for plan in plans}
    return None if choice is None else build_predictor(replace(choice, name="oracle", options=ORACLE), KnownWork(known))


ORACLE = build_strategies("heddle", overrides=["predictor=oracle"]).predictor.options


@pytest.mark.parametrize(
    ("pair", "weights"),
    [(("sticky", "least-load"), (2.0, 1.0)), (("heddle", "sticky-least-loaded"), (1.0, 3.0))],
)
def test_saturated_runs_get_tokens_by_their_weights(pair: tuple[str, str], weights: tuple[float, float]) -> None:
    watched = Watched(*pair, weights)
    assert sum(watched.tokens.values()) > 3000
    measured = watched.tokens["2"] / watched.tokens["1"]
    assert measured == pytest.approx(weights[1] / weights[0], rel=0.1)
    assert all(program.status == "completed" for program in watched.world.programs.values())
    lines = json.loads(json.dumps(watched.journal))
    builder = strategies_builder(watched.fleet.beliefs)
    first = build_strategies(pair[0])
    tell_costs(first, watched.fleet.beliefs)
    assert list(replay(Controller(first, None, builder), lines)) == []


def test_a_run_that_joins_late_gets_its_share_at_once_and_what_it_leaves_is_lent() -> None:
    watched = Watched("sticky", "sticky", (1.0, 1.0), starts_s=3.0)
    first, second = watched.ended_at_s["1"], watched.ended_at_s["2"]
    assert watched.tokens["2"] / watched.tokens["1"] == pytest.approx(1.0, rel=0.1)
    assert 3.0 < first < second
    kinds = Counter(line[0][0] for line in watched.journal)  # type: ignore[index]
    assert (kinds["RunStarted"], kinds["RunEnded"]) == (2, 1)
    assert any(row[0] == "AbortStep" for line in watched.journal for row in line[1]), "recalled"  # type: ignore[index]
