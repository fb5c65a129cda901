"""The simulated world: every preset brings everything home, as planned, by a journal that can be replayed."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from worlds.integrity import check_integrity

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.controller import Controller
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId
from heddle_dask.core.journal_codec import encode, replay
from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.core.view import Move, StrategySet
from heddle_dask.cost.engine_cost import EngineCost, load_profile
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.sim.fleet import ControlDelays, SimulatedFaults, SimulatedFleet, SimulatedLink, equal_engines
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import PRESETS, build_strategies, tell_costs
from heddle_dask.workloads.planned import PlannedStep, PlannedTrajectory, fit_into_context
from heddle_dask.workloads.synthetic import synthesize

CONTEXT = 4096
DELAYS = ControlDelays.measured(6e-3, 4e-3)


def workload(prompts: int = 6, samples: int = 4, seed: int = 1) -> list[PlannedTrajectory]:
    return [
        fit_into_context(plan, token_scale=0.1, tool_scale=1.0, max_context_tokens=CONTEXT)
        for plan in synthesize("coding", prompts=prompts, samples=samples, seed=seed)
    ]


def small_fleet(engines: int = 3, capacity: int = 9000, slots: int = 4, **more: Any) -> SimulatedFleet:
    """Few slots and little memory: steps queue, caches overflow."""
    cost = replace(load_profile("qwen3-8b-h100"), capacity_tokens=capacity, per_prompt_s=0.0)
    made = equal_engines(engines, cost, slots=slots, max_context_tokens=CONTEXT)
    return SimulatedFleet(made, delays=more.pop("delays", DELAYS), **more)


def strategies_of(preset: str, fleet: SimulatedFleet, *overrides: str) -> StrategySet:
    oracle = ["predictor=oracle"] if PRESETS[preset]["predictor"] != "none" else []
    strategies = build_strategies(preset, overrides=[*oracle, *overrides])
    tell_costs(strategies, fleet.beliefs)
    return strategies


class Run:
    """A run to its end, checked at every event."""

    def __init__(
        self,
        preset: str,
        fleet: SimulatedFleet,
        plans: list[PlannedTrajectory],
        *overrides: str,
        migration: Any = None,
        retries: RetryPolicy | None = None,
        check: bool = True,
    ) -> None:
        self.lines: list[tuple[ev.Event, list[cmd.Command]]] = []
        self.check = check
        self.preset, self.fleet, self.overrides, self.retries = preset, fleet, overrides, retries
        strategies = strategies_of(preset, fleet, *overrides)
        if migration is not None:
            strategies = replace(strategies, migration=migration)
        known = {plan.trajectory_id: float(plan.generated_tokens) for plan in plans}
        choice = strategies.predictor
        predictor = None if choice is None else build_predictor(choice, KnownWork(known))
        self.world = SimulatedWorld(strategies, fleet, plans, predictor=predictor, retries=retries, watch=self.watch)
        self.world.run()

    def watch(self, event: ev.Event, commands: Any) -> None:
        self.lines.append((event, list(commands)))
        if self.check:
            check_integrity(self.world.controller.state)

    @property
    def statuses(self) -> list[str]:
        return [program.status for program in self.world.programs.values()]

    def events(self, kind: type) -> list[Any]:
        return [event for event, _ in self.lines if isinstance(event, kind)]

    def commands(self, kind: type) -> list[Any]:
        return [command for _, commands in self.lines for command in commands if isinstance(command, kind)]

    @property
    def end_s(self) -> float:
        return max(program.finished_s for program in self.world.programs.values())

    def check_times(self) -> None:
        """Time never goes back, and no trajectory is faster than its tools and tokens allow."""
        times = [event.at for event, _ in self.lines]
        assert times == sorted(times)
        fixed_s = min(cost.fixed_s for _, cost in self.fleet.engines)
        for program in self.world.programs.values():
            least = program.plan.tools_s + program.plan.generated_tokens * fixed_s
            assert program.finished_s - program.started_s >= least, program.plan.trajectory_id

    def check_tokens(self) -> None:
        """Answers that count came to the plan's tokens, step by step."""
        whose: dict[tuple[str, int], int] = defaultdict(int)
        late = set()
        for event in self.events(ev.StepFinished):
            key = event.step_id
            assert key not in late, "an attempt ends once"
            late.add(key)
            whose[event.step_id[:2]] += event.new_tokens
        for name, program in self.world.programs.items():
            for index, step in enumerate(program.plan.steps):
                assert whose[name, index] == step.generated_tokens, (name, index)
            assert program.context_tokens == program.plan.context_tokens

    def check_replay(self) -> None:
        again = Controller(strategies_of(self.preset, self.fleet, *self.overrides), self.retries)
        rows = [[encode(event), [encode(command) for command in commands]] for event, commands in self.lines]
        assert list(replay(again, rows)) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_ends_everything_as_planned_and_its_journal_replays(preset: str) -> None:
    plans = workload()
    run = Run(preset, small_fleet(), plans)
    assert run.statuses == ["completed"] * len(plans)
    run.check_times()
    run.check_tokens()
    run.check_replay()
    engines = run.world.engines.values()
    assert all(engine.running == 0 and engine.kv_cache._used_tokens == 0 for engine in engines)
    assert 0 < max(engine.busy_s for engine in engines) <= run.end_s
    assert run.world.controller.state.stale_events == 0 or preset in ("heddle", "heddle-paper")


@pytest.mark.parametrize("seed", range(4))
def test_other_workloads_and_delays_end_too(seed: int) -> None:
    plans = workload(prompts=5, seed=seed + 10)
    delays = ControlDelays() if seed % 2 else ControlDelays(0.1, 0.2, 0.3, 0.05, 0.5)
    for preset in ("heddle", "heddle-paper", "slime", "autellix"):
        run = Run(preset, small_fleet(2, 7000, slots=2 + seed, delays=delays), plans, check=False)
        assert run.statuses == ["completed"] * len(plans)
        run.check_times()
        run.check_tokens()


def test_a_trajectory_alone_takes_its_tokens_its_tools_and_the_delays() -> None:
    steps = (
        PlannedStep(50, 30, "t", 2.0),
        PlannedStep(20, 10, None, 0.0),
        PlannedStep(5, 0, None, 0.0),
    )
    plan = PlannedTrajectory("a", "g", 0, "x", 100, steps)
    cost = EngineCost(fixed_s=0.01, capacity_tokens=10_000)
    fleet = SimulatedFleet(
        equal_engines(1, cost, slots=4, max_context_tokens=CONTEXT),
        delays=ControlDelays(0.1, 0.2, 0.3, 0.4, 0.0),
    )
    run = Run("sticky", fleet, [plan])
    program = run.world.programs["a"]
    assert program.finished_s == pytest.approx(75 * 0.01 + 2.0 + 3 * (0.1 + 0.2 + 0.3) + 2 * 0.4)
    assert program.queue_s == pytest.approx(3 * (0.1 + 0.2))
    # Whole blocks of what stood in the cache before: 149 tokens, then 180 + 19.
    assert program.prefilled_tokens == 100 + (180 - 144) + (210 - 192)


def test_an_engine_of_whole_prompts_takes_any_context_beside_others() -> None:
    """A table that was measured with shorter contexts says fewer tokens an iteration than vLLM starts with."""
    cost = EngineCost(fixed_s=0.01, chunk_tokens=64, capacity_tokens=10_000, whole_prompts=True)
    fleet = SimulatedFleet(
        equal_engines(1, cost, slots=2, max_context_tokens=CONTEXT), delays=ControlDelays(0, 0, 0, 0, 0)
    )
    plans = [
        PlannedTrajectory(name, name, 0, "x", prompt, (PlannedStep(tokens, 0, None, 0.0),))
        for name, prompt, tokens in (("short", 10, 500), ("long", 2000, 100))
    ]
    run = Run("sticky", fleet, plans)
    ends = {name: program.finished_s for name, program in run.world.programs.items()}
    assert ends == pytest.approx({"short": 5.0, "long": 1.0})


def test_steps_that_are_stopped_go_on_where_they_stopped() -> None:
    run = Run(
        "heddle-paper",
        small_fleet(2, 20_000, slots=2),
        workload(),
        "preemption=hysteresis,ratio=1.0,margin_tokens=0,least_wait_tokens=0",
    )
    aborted = [event for event in run.events(ev.StepFinished) if event.finish_reason == "abort"]
    assert aborted, "nothing was stopped: this tests nothing"
    stopped = sum(program.preemptions for program in run.world.programs.values())
    assert stopped == len(aborted)
    run.check_tokens()
    assert (
        max(event.step_id.attempt for event in run.events(ev.StepFinished))
        <= RetryPolicy().max_preemptions + 1  # and another engine may take it, once
    )


class Restless:
    """Moves every context to the next engine while its tool runs."""

    def __init__(self, engines: int, kind: Any) -> None:
        self.engines, self.kind = engines, kind

    def propose(self, view: Any, trajectory: Any) -> Move | None:
        home = int(trajectory.home.rpartition("-")[2])
        target = EngineId(f"engine-{(home + 1) % self.engines}")
        if all(engine.engine_id != target for engine in view.ready_engines):
            return None
        return Move(target, self.kind)

    def choose(self, pending: Any, running: Any) -> list[Any]:
        busy = {end for move in running for end in (move.source, move.target)}
        chosen = []
        for move in pending:
            if move.source not in busy and move.target not in busy:
                chosen.append(move)
                busy.update((move.source, move.target))
        return chosen


@pytest.mark.parametrize("kind", ["transfer", "recompute"])
@pytest.mark.parametrize("lost_s", [None, 4.0])
def test_moves_end_and_contexts_are_found_where_they_went(kind: str, lost_s: float | None) -> None:
    faults = SimulatedFaults(engines_lost={} if lost_s is None else {1: lost_s})
    # A slow way to the engines keeps moves under way for longer, so that the fault meets some.
    delays = replace(DELAYS, start_s=0.3)
    fleet = small_fleet(3, 30_000, slots=8, link=SimulatedLink(0.3, 1e-5), faults=faults, delays=delays)
    plans = workload(prompts=12)
    run = Run("heddle", fleet, plans, "admission=unlimited", migration=Restless(3, kind), check=lost_s is not None)
    assert run.statuses == ["completed"] * len(plans)
    run.check_times()
    moves, ended = run.commands(cmd.MoveContext), run.events(ev.MoveEnded)
    totals = run.world.controller.moves.totals[kind]
    assert len(moves) == totals.started > 10
    assert run.world.controller.moves.running == 0
    assert run.world.moves.running == 0 or lost_s is not None
    if lost_s is None:
        assert len(ended) == len(moves)
        assert all(event.ok for event in ended)
        assert sum(event.tokens for event in ended) == totals.tokens > 0
        if kind == "transfer":
            moved = {event.trajectory_id: event.seconds for event in ended}
            assert min(moved.values()) > 0.3
        first = {plan.trajectory_id: plan.prompt_tokens for plan in plans}
        found = [e for e in run.events(ev.StepFinished) if e.step_id.trajectory_id == moves[0].trajectory_id]
        assert all(e.cached_tokens > first[e.step_id.trajectory_id] // 2 for e in found[1:])
        run.check_tokens()
    else:
        assert totals.failed > 0, "no move was under way: choose another second"
        assert not [c for c in run.commands(cmd.StartStep)[-10:] if c.engine_id == "engine-1"]


def test_a_move_without_room_fails_and_the_trajectory_goes_on() -> None:
    fleet = small_fleet(2, CONTEXT + 16, slots=4, link=SimulatedLink(0.05, 0.0))
    plans = workload()
    run = Run("heddle", fleet, plans, migration=Restless(2, "transfer"))
    assert run.statuses == ["completed"] * len(plans)
    assert any(not event.ok and event.cause for event in run.events(ev.MoveEnded))
    run.check_tokens()


@pytest.mark.parametrize("preset", ["heddle", "heddle-paper", "slime", "verl", "cache-aware"])
@pytest.mark.parametrize("report_s", [0.0, 0.5])
def test_when_engines_are_lost_the_others_finish(preset: str, report_s: float) -> None:
    """With a slow way back, answers of the lost engine are under way while their steps run a second time."""
    delays = replace(DELAYS, report_s=report_s)
    fleet = small_fleet(4, faults=SimulatedFaults(engines_lost={0: 2.0, 2: 4.5}), delays=delays)
    plans = workload()
    run = Run(preset, fleet, plans)
    assert run.statuses == ["completed"] * len(plans)
    run.check_times()
    run.check_replay()
    for program in run.world.programs.values():
        assert program.context_tokens == program.plan.context_tokens
        assert program.queue_s < program.finished_s - program.started_s
    lost = {"engine-0": 2.0, "engine-2": 4.5}
    for event, commands in run.lines:
        for command in commands:
            if isinstance(command, cmd.StartStep):
                assert event.at <= lost.get(command.engine_id, math.inf)
    assert run.world.engines[EngineId("engine-0")].busy_s <= 2.0


@pytest.mark.parametrize("slot_s", [0.0, 0.01])
@pytest.mark.parametrize("preset", PRESETS)
def test_an_engine_that_drains_before_its_end_loses_nothing(preset: str, slot_s: float) -> None:
    """With `slot_s`, steps wait at the worker, where they are called off."""
    faults = SimulatedFaults(engines_end={0: 4.0, 2: 6.0}, drain_s=3.0)
    fleet = small_fleet(3, faults=faults, delays=replace(DELAYS, slot_s=slot_s, steps_ahead=1))
    plans = workload()
    run = Run(preset, fleet, plans)
    assert run.statuses == ["completed"] * len(plans)
    run.check_times()
    run.check_replay()
    released = {command.engine_id: command for command in run.commands(cmd.ReleaseEngine)}
    assert set(released) == {"engine-0", "engine-2"}
    orders = [command for _, commands in run.lines for command in commands]
    assert any(isinstance(order, cmd.AbortStep) for order in orders)
    begins = {"engine-0": 1.0, "engine-2": 3.0}
    for event, commands in run.lines:
        for command in commands:
            if isinstance(command, cmd.StartStep):
                assert event.at <= begins.get(command.engine_id, math.inf)
            assert not (isinstance(event, ev.EngineLost) and isinstance(command, cmd.StartStep)), "it was empty"
    for program in run.world.programs.values():
        assert program.context_tokens == program.plan.context_tokens


@pytest.mark.parametrize("preset", ["heddle", "slime", "verl"])
def test_engines_that_die_by_chance_are_replaced_until_all_have_ended(preset: str) -> None:
    faults = SimulatedFaults(engine_mtbf_s=6.0, engine_restart_s=1.5)
    plans = workload()
    runs = [Run(preset, small_fleet(3, faults=faults), plans, retries=RetryPolicy(max_losses=99)) for _ in range(2)]
    run = runs[0]
    assert run.statuses == ["completed"] * len(plans)
    run.check_times()
    run.check_replay()
    lost, joined = run.events(ev.EngineLost), run.events(ev.EngineJoined)
    assert len(lost) >= 3 and len({event.engine_id for event in lost}) == len(lost)
    # Each has another in its place, but for those whose start the end of the last trajectory has overtaken.
    for event in lost:
        assert event.at + 1.5 > run.end_s or event.at + 1.5 in [pytest.approx(other.at) for other in joined]
    assert [event.at for event in lost] == [event.at for event in runs[1].events(ev.EngineLost)]
    # The loop ends: engines are not lost and replaced for ever.
    assert run.world.time.now_s < run.end_s + 1000


def test_steps_whose_engines_die_too_often_are_given_up_and_end_failed() -> None:
    steps = (PlannedStep(3000, 0, None, 0.0),)
    plans = [PlannedTrajectory("a", "g", 0, "x", 100, steps)]
    fleet = small_fleet(3, faults=SimulatedFaults(engines_lost={0: 1.0, 1: 1.5, 2: 2.0}))
    lost = SimulatedFaults(engines_lost={0: 1.0, 1: 1.0, 2: 1.0})
    run = Run("sticky", fleet, plans, retries=RetryPolicy(max_losses=0))
    assert run.statuses == ["failed"]
    with pytest.raises(RuntimeError, match="never ended, the first is a"):
        Run("sticky", small_fleet(3, faults=lost), plans)


def test_tools_that_fail_take_half_their_time_and_the_same_ones_fail_whatever_the_strategy() -> None:
    plans = workload()
    failed = []
    for preset in ("sticky", "heddle"):
        run = Run(preset, small_fleet(faults=SimulatedFaults(tool_failure_share=0.3)), plans, check=False)
        assert run.statuses == ["completed"] * len(plans)
        ended = run.events(ev.ActionFinished)
        failed.append(sorted(event.action_id for event in ended if not event.ok))
        for event in ended:
            name, _, index = event.action_id.rpartition(":")
            tool_s = run.world.programs[name].plan.steps[int(index) - 1].tool_s
            assert event.run_s == pytest.approx(tool_s if event.ok else tool_s / 2)
    assert failed[0] == failed[1]
    assert 0.1 < len(failed[0]) / len(ended) < 0.5


@pytest.mark.parametrize("preset", ["heddle", "slime"])
def test_at_the_walltime_all_that_lives_is_aborted(preset: str) -> None:
    plans = workload()
    whole = Run(preset, small_fleet(2, faults=SimulatedFaults(walltime_s=1e6)), plans, check=False)
    assert whole.statuses == ["completed"] * len(plans)
    assert whole.world.time.now_s < 1e5
    over_s = whole.end_s / 2
    fleet = small_fleet(2, faults=SimulatedFaults(walltime_s=over_s))
    run = Run(preset, fleet, plans, "admission=at-most,alive=16", check=False)
    assert set(run.statuses) == {"completed", "aborted"}
    for program in run.world.programs.values():
        if program.status == "aborted":
            assert program.finished_s == over_s
        else:
            assert program.finished_s <= over_s
        assert not program.started_s >= over_s
    assert all(engine.busy_s <= over_s for engine in run.world.engines.values())
    assert run.world.controller.state.alive == 0


@pytest.mark.parametrize("preset", ["heddle", "heddle-paper"])
def test_wrong_beliefs_change_decisions_and_nothing_else(preset: str) -> None:
    plans = workload()
    truth = load_profile("qwen3-8b-h100")
    wrong = replace(truth, fixed_s=truth.fixed_s * 3, context_token_s=0.0)
    run = Run(preset, small_fleet(believed={1: wrong}), plans)
    assert run.statuses == ["completed"] * len(plans)
    run.check_tokens()
    run.check_times()


def test_a_tool_pool_runs_no_more_than_it_has_cpus_and_the_rest_queue() -> None:
    plans = [
        PlannedTrajectory(
            f"t{number}",
            f"g{number}",
            0,
            "x",
            50,
            (PlannedStep(5, 5, "t", 1.0), PlannedStep(5, 0, None, 0.0)),
        )
        for number in range(10)
    ]
    free = Run("sticky", small_fleet(slots=16), plans)
    bound = Run("sticky", small_fleet(slots=16, tool_cpus=2), plans)
    assert free.end_s < 1.5
    assert bound.end_s > 5.0
    for run, most in ((free, 10), (bound, 2)):
        running = peak = 0
        for event, commands in run.lines:
            running -= isinstance(event, ev.ActionFinished)
            running += sum(isinstance(command, cmd.RunAction) for command in commands)
            peak = max(peak, running)
        assert peak == most


def test_an_engine_whose_memory_holds_no_context_is_refused() -> None:
    with pytest.raises(BadInput, match=r"engine-0 \(TP 1\) has KV room for 4000 tokens"):
        small_fleet(1, 4000)
    with pytest.raises(BadInput, match="no engine"):
        SimulatedFleet(())


def test_an_admission_by_forecast_contexts_computes_little_twice_where_memory_is_short() -> None:
    """Sixteen slots, and memory for three or four contexts of 1,500 tokens."""
    steps = tuple(PlannedStep(60, 240, "t", 0.5) for _ in range(5))
    plans = [PlannedTrajectory(f"t{n}", f"g{n}", 0, "x", 100, steps) for n in range(24)]
    cost = EngineCost(fixed_s=0.01, prefill_token_s=1e-3, capacity_tokens=6_000)

    def played(*overrides: str) -> tuple[int, float]:
        fleet = SimulatedFleet(equal_engines(1, cost, slots=16, max_context_tokens=CONTEXT))
        run = Run("sticky", fleet, plans, *overrides)
        assert set(run.statuses) == {"completed"}
        return run.world.controller.state.evictions, run.world.time.now_s

    most, unlimited_s = played("admission=unlimited")
    some, bounded_s = played("admission=kv-forecast")
    assert most > 2 * some and bounded_s < 0.8 * unlimited_s
    ample = replace(cost, capacity_tokens=60_000)
    run = Run("sticky", SimulatedFleet(equal_engines(1, ample, slots=16, max_context_tokens=CONTEXT)), plans)
    assert run.world.controller.state.evictions == 0
