"""The lower bound of a makespan: no simulated run beats it, and by hand where that is easy."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.core_builders import Restless

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.errors import BadInput
from heddle_dask.core.nouns import StepRequest
from heddle_dask.cost.engine_cost import EngineCost, engine_cost_for
from heddle_dask.predictors.chosen import build_predictor
from heddle_dask.predictors.known import KnownWork
from heddle_dask.sim.bound import makespan_bound
from heddle_dask.sim.bound_work import measure_work
from heddle_dask.sim.fleet import ControlDelays, SimulatedFaults, SimulatedFleet, SimulatedLink, equal_engines
from heddle_dask.sim.rollout import simulate
from heddle_dask.sim.world import SimulatedWorld
from heddle_dask.strategies.presets import PRESETS, build_strategies, tell_costs
from heddle_dask.workloads.choice import load_workload
from heddle_dask.workloads.planned import PlannedStep, PlannedTrajectory

COST = EngineCost(
    fixed_s=0.01,
    token_s=4e-4,
    prefill_token_s=4e-4,
    sequence_s=2e-4,
    context_token_s=2e-5,
    chunk_tokens=64,
    capacity_tokens=900,
)
ORACLE = {name: ["predictor=oracle"] if parts["predictor"] != "none" else [] for name, parts in PRESETS.items()}


def planned(number: int, group: int, prompt: int, *steps: tuple[int, int, float | None]) -> PlannedTrajectory:
    """Steps as (sampled, observed, tool seconds or None)."""
    made = tuple(PlannedStep(g, o, None if s is None else "tool", s or 0.0) for g, o, s in steps)
    return PlannedTrajectory(f"t{number}", f"g{group}", number, "test", prompt, made)


def fleet(engines: int = 1, cost: EngineCost = COST, slots: int = 4, **rest: object) -> SimulatedFleet:
    return SimulatedFleet(equal_engines(engines, cost, slots=slots, max_context_tokens=400), **rest)  # type: ignore[arg-type]


STEPS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 20), st.sampled_from([None, 0.0, 0.05, 0.6])),
    min_size=1,
    max_size=4,
)
PLANS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 90), STEPS), min_size=1, max_size=14)


@settings(max_examples=80, deadline=None)
@given(
    plans=PLANS,
    preset=st.sampled_from(sorted(PRESETS)),
    engines=st.integers(1, 3),
    slots=st.integers(1, 6),
    cost=st.sampled_from(
        [
            COST,
            replace(COST, capacity_tokens=430),
            replace(COST, token_s=5e-3),
            replace(COST, prefill_token_s=1e-5),
            replace(COST, spared_s=0.008, expert_share=0.25),
            replace(COST, sequence_s=0.01),
        ]
    ),
    seed=st.integers(0, 3),
)
def test_no_run_beats_the_bound(
    plans: list[tuple[int, int, list[tuple[int, int, float | None]]]],
    preset: str,
    engines: int,
    slots: int,
    cost: EngineCost,
    seed: int,
) -> None:
    work = [planned(i, group, prompt, *steps) for i, (group, prompt, steps) in enumerate(plans)]
    run = simulate(preset, ORACLE[preset], fleet(engines, cost, slots), work, seed=seed)
    assert run.makespan_s >= run.bound.seconds - 1e-5, (run.bound, run.makespan_s)


@settings(max_examples=25, deadline=None)
@given(plans=PLANS, preset=st.sampled_from(["heddle", "slime", "least-load"]), small=st.integers(1, 2))
def test_no_run_on_unlike_engines_with_delays_and_few_tool_cpus_beats_the_bound(
    plans: list[tuple[int, int, list[tuple[int, int, float | None]]]], preset: str, small: int
) -> None:
    work = [planned(i, group, prompt, *steps) for i, (group, prompt, steps) in enumerate(plans)]
    quick = replace(COST, fixed_s=0.004, token_s=2e-4, context_token_s=1e-5, capacity_tokens=1800)
    slow = equal_engines(small, COST, slots=4, max_context_tokens=400)
    fast = equal_engines(1, quick, slots=8, max_context_tokens=400, tp_degree=2, first=small)
    mixed = SimulatedFleet((*slow, *fast), delays=ControlDelays(1e-3, 1e-3, 2e-3, 3e-3, 1e-3), tool_cpus=2)
    run = simulate(preset, ORACLE[preset], mixed, work, seed=0)
    assert run.makespan_s >= run.bound.seconds - 1e-5, (run.bound, run.makespan_s)


MOVING = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 90), st.sampled_from([None, None, 0.0, 0.05, 0.6])),
    min_size=2,
    max_size=5,
)


@settings(max_examples=120, deadline=None)
@given(
    plans=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), MOVING), min_size=2, max_size=10),
    engines=st.integers(2, 3),
    slots=st.integers(1, 4),
    capacity=st.sampled_from([430, 600, 1800]),
    setup_s=st.sampled_from([0.0, 0.02]),
    whole=st.booleans(),
)
def test_free_links_dear_prefill_and_restless_moves_do_not_beat_the_bound(
    plans: list[tuple[int, int, list[tuple[int, int, float | None]]]],
    engines: int,
    slots: int,
    capacity: int,
    setup_s: float,
    whole: bool,
) -> None:
    """A transfer carries what the source has computed, and its steps take time on both engines."""
    work = [planned(i, group, prompt, *steps) for i, (group, prompt, steps) in enumerate(plans)]
    dear = replace(COST, token_s=5e-3, prefill_token_s=2e-2, capacity_tokens=capacity)
    moving = fleet(engines, dear, slots, link=SimulatedLink(setup_s, 0.0, whole))
    overrides = ["predictor=oracle", "admission=unlimited"]
    strategies = replace(build_strategies("heddle", overrides=overrides), migration=Restless(("transfer",)))
    tell_costs(strategies, moving.beliefs)
    known = KnownWork({plan.trajectory_id: float(plan.generated_tokens) for plan in work})
    assert strategies.predictor is not None
    world = SimulatedWorld(strategies, moving, work, predictor=build_predictor(strategies.predictor, known))
    world.run()
    end_s = max(program.finished_s for program in world.programs.values())
    assert end_s >= makespan_bound(work, moving).seconds - 1e-5


def test_a_trajectory_alone_takes_hardly_more_than_the_path_bound() -> None:
    work = [planned(0, 0, 150, (30, 12, 0.5), (1, 7, None), (20, 0, None))]
    run = simulate("slime", [], fleet(), work, seed=0)
    # What it leaves out: early chunks of a long prompt read those before them, and stopping a step may save 0.2 ms.
    assert run.bound.path_s <= run.makespan_s <= 1.003 * run.bound.path_s


def test_full_batches_of_equal_steps_take_the_work_bound() -> None:
    cost = EngineCost(fixed_s=0.01, token_s=1e-3, prefill_token_s=1e-3)
    work = [planned(i, i, 1, (200, 0, None)) for i in range(8)]
    run = simulate("slime", [], fleet(2, cost), work, seed=0)
    assert run.makespan_s == pytest.approx(200 * (0.01 + 4e-3))
    assert run.bound.work_s == pytest.approx(run.makespan_s)


def test_kv_capacity_limits_the_batch() -> None:
    cost = EngineCost(fixed_s=0.01, capacity_tokens=500)
    work = [planned(i, i, 160, (80, 0, None)) for i in range(6)]
    wide = makespan_bound(work, fleet(1, replace(cost, capacity_tokens=10**6), slots=6))
    tight = makespan_bound(work, fleet(1, cost, slots=6))
    # 200 tokens of context on average: 2.5 of the 6 at a time.
    assert tight.work_s / wide.work_s == pytest.approx(6 / 2.5, rel=0.03)


def test_a_prompt_counts_once_in_a_group() -> None:
    alone = measure_work([planned(0, 0, 160, (1, 0, None))])
    together = measure_work([planned(i, 0, 160, (1, 0, None)) for i in range(4)])
    assert alone.prefill_tokens == 160
    # The last block of 16 is never found.
    assert together.prefill_tokens == 160 + 3 * 16


def test_the_combined_bound_beats_both_where_one_trajectory_must_be_quick() -> None:
    cost = EngineCost(fixed_s=0.01, token_s=1e-3, prefill_token_s=1e-3)
    work = [planned(0, 0, 1, (380, 0, None)), *(planned(i, i, 1, (100, 0, None)) for i in range(1, 20))]
    bound = makespan_bound(work, fleet(1, cost, slots=8))
    assert bound.combined_s > 1.02 * max(bound.path_s, bound.work_s)
    run = simulate("heddle", ["predictor=oracle"], fleet(1, cost, slots=8), work, seed=0)
    assert bound.seconds <= run.makespan_s


def test_tools_share_their_cpus() -> None:
    work = [planned(i, i, 1, (1, 0, 5.0), (1, 0, None)) for i in range(6)]
    assert makespan_bound(work, fleet(tool_cpus=2)).tools_s == 15.0
    assert makespan_bound(work, fleet()).tools_s == 0.0


def test_more_of_everything_lowers_the_bound() -> None:
    plans = load_workload("coding", trajectories=640, samples=16, seed=0, max_context_tokens=40_960)
    cost = engine_cost_for("qwen3-30b-a3b", "h100", 2)

    def seconds(engines: int) -> float:
        engines_ = equal_engines(engines, cost, slots=100, max_context_tokens=40_960)
        return makespan_bound(plans, SimulatedFleet(engines_)).seconds

    assert seconds(1) > 1.5 * seconds(2) > seconds(8)
    # The longest path is left.
    assert seconds(64) == seconds(128)


def test_no_trajectory_has_no_bound() -> None:
    with pytest.raises(BadInput, match="at least one"):
        makespan_bound([], fleet())


@dataclass
class Fixed:
    """Every trajectory where the list says."""

    engine_of: dict[str, str]

    def choose_engine(self, trajectory: Trajectory, step: StepRequest, candidates: Sequence[Engine]) -> Engine:
        target = self.engine_of[trajectory.trajectory_id]
        return next(engine for engine in candidates if engine.engine_id == target)


def every_schedule(work: list[PlannedTrajectory], tiny: SimulatedFleet) -> list[float]:
    """Makespans of every placement, by every order, with every number alive at once."""
    names = [str(spec.engine_id) for spec, _ in tiny.engines]
    found = []
    for alive in range(1, len(work) + 1):
        for placed in itertools.product(names, repeat=len(work)):
            engine_of = {plan.trajectory_id: name for plan, name in zip(work, placed, strict=True)}
            for order in itertools.permutations(work):
                chosen = build_strategies("least-load", overrides=[f"admission=at-most,alive={alive}"])
                world = SimulatedWorld(replace(chosen, placement=Fixed(engine_of)), tiny, order, seed=0)
                world.run()
                found.append(max(program.finished_s for program in world.programs.values()))
    return found


@settings(max_examples=12, deadline=None)
@given(
    plans=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 90), STEPS), min_size=1, max_size=3),
    engines=st.integers(1, 2),
    slots=st.integers(1, 2),
    capacity=st.sampled_from([430, 900]),
)
def test_no_placement_and_no_order_of_a_few_beats_the_bound(
    plans: list[tuple[int, int, list[tuple[int, int, float | None]]]], engines: int, slots: int, capacity: int
) -> None:
    work = [planned(i, group, prompt, *steps) for i, (group, prompt, steps) in enumerate(plans)]
    tiny = fleet(engines, replace(COST, capacity_tokens=capacity), slots)
    bound = makespan_bound(work, tiny)
    assert bound.seconds <= min(every_schedule(work, tiny)) + 1e-5


def test_the_bound_is_near_the_best_schedule_of_a_few() -> None:
    rng = random.Random(0)
    shares = []
    for _ in range(16):
        work = []
        for number in range(rng.randint(1, 3)):
            steps = [
                (rng.randint(1, 40), rng.randint(0, 20), rng.choice([None, 0.0, 0.05, 0.6]))
                for _ in range(rng.randint(1, 4))
            ]
            work.append(planned(number, rng.randint(0, 1), rng.randint(1, 90), *steps))
        tiny = fleet(rng.randint(1, 2), replace(COST, capacity_tokens=rng.choice([430, 900])), rng.randint(1, 2))
        shares.append(makespan_bound(work, tiny).seconds / min(every_schedule(work, tiny)))
    assert min(shares) > 0.85 and statistics.median(shares) > 0.95, shares


@settings(max_examples=40, deadline=None)
@given(PLANS, st.sampled_from([0.3, 1.0]), st.integers(0, 2))
def test_no_run_in_which_tools_fail_beats_the_bound(rows: list, share: float, cpus: int) -> None:  # type: ignore[type-arg]
    """A call that fails takes half of its time."""
    plans = [planned(n, group, prompt, *steps) for n, (group, prompt, steps) in enumerate(rows)]
    broken = fleet(2, faults=SimulatedFaults(tool_failure_share=share), tool_cpus=cpus)
    run = simulate("slime", (), broken, plans, seed=1)
    assert run.completed == len(plans)
    assert run.bound_share <= 1 + 1e-9
