"""Regroups in virtual time: every token is generated, nothing is ended under a step, failures are survived."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.journal_codec import encode, replay
from heddle_dask.core.view import StrategySet
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.sim.bound import makespan_bound, regrouped_bound
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.fleet import Faults, SimulatedFleet
from heddle_dask.sim.rollout import simulate
from heddle_dask.sim.timeline import Timeline
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import build_strategies, tell_costs, tell_restart
from heddle_dask.workloads.planned import PlannedTrajectory
from heddle_dask.workloads.synthetic import fit_into_context, synthesize

CONTEXT = 16_384
MERGE = "regrouping=merge-idle"


def workload(seed: int = 1, name: str = "search") -> list[PlannedTrajectory]:
    plans = synthesize(name, prompts=8, samples=8, seed=seed)
    return [
        fit_into_context(plan, token_scale=0.5, tool_scale=0.3, max_context_tokens=CONTEXT) for plan in plans
    ]


def fleet_of(tp: Any = 1, restart_s: float = 5.0, **more: Any) -> SimulatedFleet:
    cluster = Cluster(gpus=8, tp=tp, restart_s=restart_s)
    return replace(cluster.fleet("qwen3-8b", max_context_tokens=CONTEXT), **more)


class Run:
    """A run of heddle to its end; its engines' steps are followed."""

    def __init__(
        self, fleet: SimulatedFleet, plans: list[PlannedTrajectory], *overrides: str, preset: str = "heddle"
    ) -> None:
        self.overrides = ("predictor=oracle", *overrides)
        self.fleet, self.preset, self.plans = fleet, preset, plans
        strategies = self.strategies()
        known = {plan.trajectory_id: float(plan.generated_tokens) for plan in plans}
        assert strategies.predictor is not None
        self.lines: list[tuple[ev.Event, list[cmd.Command]]] = []
        self.at_work: dict[str, set[tuple[str, int, int]]] = defaultdict(set)
        self.timeline = Timeline()
        self.world = SimulatedWorld(
            strategies,
            fleet,
            plans,
            predictor=build_predictor(strategies.predictor, KnownWork(known)),
            watch=self._watch,
        )
        self.world.run()
        self.end_s = max(program.finished_s for program in self.world.programs.values())
        self.totals = self.world.controller.regroups.totals

    def strategies(self) -> StrategySet:
        strategies = build_strategies(self.preset, overrides=self.overrides)
        tell_costs(strategies, self.fleet.beliefs)
        assert self.fleet.merging is not None
        tell_restart(strategies, self.fleet.merging.restart_s)
        return strategies

    def _watch(self, event: ev.Event, commands: Any) -> None:
        self.lines.append((event, list(commands)))
        self.timeline.watch(event, commands)
        self.world.controller.state.check_integrity()
        if isinstance(event, ev.StepFinished):
            step = (event.trajectory_id, event.step_index, event.attempt)
            self.at_work[event.engine_id].discard(step)
        for command in commands:
            match command:
                case cmd.StartStep():
                    step = (command.trajectory_id, command.step_index, command.attempt)
                    self.at_work[command.engine_id].add(step)
                case cmd.RegroupEngines():
                    for name in command.engine_ids:
                        assert not self.at_work[name], f"{name} is ended under a step"

    def commands(self, kind: type) -> list[Any]:
        return [command for _, commands in self.lines for command in commands if isinstance(command, kind)]

    def events(self, kind: type) -> list[Any]:
        return [event for event, _ in self.lines if isinstance(event, kind)]

    def check(self) -> None:
        """All ended, with the planned tokens, nothing on an engine after its end; the journal replays."""
        made: dict[tuple[str, int], int] = defaultdict(int)
        for event in self.events(ev.StepFinished):
            made[event.trajectory_id, event.step_index] += event.new_tokens
        for name, program in self.world.programs.items():
            assert program.status == "completed"
            assert program.context_tokens == program.plan.context_tokens
            for index, step in enumerate(program.plan.steps):
                assert made[name, index] == step.generated_tokens
        gone: dict[str, float] = {}
        for event, commands in self.lines:
            if isinstance(event, ev.EngineLost):
                gone[event.engine_id] = event.at
            assert not [c for c in commands if isinstance(c, cmd.StartStep) and c.engine_id in gone]
        rows = [[encode(event), [encode(command) for command in commands]] for event, commands in self.lines]
        assert list(replay(Controller(self.strategies()), rows)) == []


@pytest.mark.parametrize("tp", [1, 2, (4, 2, 1, 1)])
@pytest.mark.parametrize("evacuate", [True, False])
def test_engines_merge_for_the_tail_and_every_token_is_generated_once(tp: Any, evacuate: bool) -> None:
    merged = 0
    for seed in range(3):
        plans = workload(seed)
        # Engines that keep time end together, and leave little of a tail to merge for.
        run = Run(fleet_of(tp), plans, f"{MERGE},evacuate={evacuate}", "admission=kv-fit,in_time=False")
        run.check()
        merged += run.totals.merges
        assert run.totals.seconds == pytest.approx(5.0 * len(run.events(ev.RegroupEnded)))
        assert run.totals.merges == len(run.commands(cmd.RegroupEngines))
        assert evacuate or run.totals.evacuated == 0
        for order in run.commands(cmd.RegroupEngines):
            spec = {e.engine_id: e for e, _ in run.fleet.engines} | {
                event.engine.engine_id: event.engine for event in run.events(ev.EngineJoined)
            }
            assert sum(spec[name].tp_degree for name in order.engine_ids) == order.tp_degree
    assert merged > 0, "nothing was merged: this tests nothing"


def test_a_merged_engine_is_of_its_degree_has_its_memory_and_takes_over() -> None:
    run = Run(fleet_of(1, 1.0), workload(), MERGE)
    joined = [event.engine for event in run.events(ev.EngineJoined)][8:]
    assert joined and all(engine.tp_degree > 1 and engine.node == "node-0" for engine in joined)
    for engine in joined:
        assert engine.slots == 100 * engine.tp_degree
        assert engine.kv_capacity_tokens > engine.tp_degree * run.fleet.engines[0][0].kv_capacity_tokens
        assert run.world.engines[engine.engine_id].busy_s > 0
    assert run.end_s < Run(fleet_of(1, 1.0), workload()).end_s, "here it pays"


def test_where_the_price_is_too_high_the_run_is_that_without() -> None:
    plans = workload()
    dear, without = Run(fleet_of(1, 1e4), plans, MERGE), Run(fleet_of(1, 1e4), plans)
    assert dear.totals.merges == 0
    assert [encode(event) for event, _ in dear.lines] == [encode(event) for event, _ in without.lines]


def test_a_merged_engine_that_does_not_start_costs_its_gpus_and_no_trajectory() -> None:
    plans = workload()
    faults = Faults(regroup_failure_share=1.0)
    run = Run(fleet_of(1, 5.0, faults=faults), plans, MERGE)
    run.check()
    ended = run.events(ev.RegroupEnded)
    assert ended and not any(event.ok or event.engine_id for event in ended)
    assert run.totals.failed == len(ended) and run.totals.attracted == 0
    assert len(run.events(ev.EngineJoined)) == 8
    assert len(run.world.controller.state.ready_engines) == 8 - run.totals.engines >= 1
    assert run.totals.merges <= 8, "it does not go on for ever"


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_engines_that_are_lost_on_the_way_are_survived(share: float) -> None:
    """Before, while, and after engines retire, those that merge among them."""
    plans = workload()
    first = Run(fleet_of(1, 5.0), plans, MERGE)
    order_s = next(
        event.at for event, commands in first.lines for c in commands if "Regroup" in type(c).__name__
    )
    names = first.commands(cmd.RegroupEngines)[0].engine_ids
    retired = int(names[0].rpartition("-")[2])
    other = next(n for n in range(8) if f"engine-{n}" not in names)
    lost = {retired: order_s - 0.5 + share, other: order_s + 10 * share}
    run = Run(fleet_of(1, 5.0, faults=Faults(engines_lost=lost)), plans, MERGE)
    assert [program.status for program in run.world.programs.values()] == ["completed"] * len(plans)
    for program in run.world.programs.values():
        assert program.context_tokens == program.plan.context_tokens


def test_the_report_tells_what_was_regrouped_and_its_bound_holds() -> None:
    plans = workload()
    fleet = fleet_of(1, 1.0)
    rollout = simulate("heddle", ["predictor=oracle", MERGE], fleet, plans, seed=0, watched=True)
    regroups: Any = rollout.figures()["regroups"]
    assert regroups["merges"] > 0 and regroups["engines"] > regroups["merges"]
    assert regroups["seconds"] == regroups["merges"] * 1.0
    assert rollout.makespan_s >= rollout.bound.seconds == regrouped_bound(plans, fleet).seconds
    assert rollout.bound.path_s <= makespan_bound(plans, fleet).path_s
    assert rollout.timeline is not None and len(rollout.timeline.running) == 8 + regroups["merges"]
    again = simulate("heddle", ["predictor=oracle", MERGE], fleet, plans, seed=0)
    assert again.figures() == rollout.figures()
    plain = simulate("heddle", ["predictor=oracle"], fleet, plans, seed=0).figures()["regroups"]
    assert set(plain.values()) == {0}  # type: ignore[attr-defined]


def test_presets_that_predict_nothing_never_regroup() -> None:
    rollout = simulate("verl", [MERGE], fleet_of(1, 1.0), workload(), seed=0)
    assert rollout.regroups["merges"] == 0
