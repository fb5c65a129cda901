"""Nothing that a strategy, a predictor or a session sees depends on the future of a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core import events as ev
from heddle_dask.core.journal_codec import encode
from heddle_dask.cost.engine_cost import load_profile
from heddle_dask.sim.fleet import ControlDelays, SimulatedFleet, equal_engines
from heddle_dask.sim.rollout import simulate
from heddle_dask.workloads.planned import PlannedStep, PlannedTrajectory, fit_into_context
from heddle_dask.workloads.synthetic import synthesize

CONTEXT = 2500
STRATEGIES = {
    "learned": ("heddle", []),
    "no predictor": ("heddle", ["predictor=none"]),
    "paper": ("heddle-paper", []),
    "router": ("cache-aware", ["admission=additive-increase"]),
}
ORACLE = ("heddle", ["predictor=oracle"])
TAILS = st.lists(
    st.tuples(st.integers(1, 900), st.integers(0, 900), st.sampled_from([0.0, 0.3, 5.0])),
    min_size=1,
    max_size=6,
)


def drawn(seed: int, prompts: int) -> list[PlannedTrajectory]:
    return synthesize("coding", prompts=prompts, samples=4, seed=seed)


def fitted(plans: Sequence[PlannedTrajectory]) -> list[PlannedTrajectory]:
    return [fit_into_context(plan, token_scale=0.1, tool_scale=1.0, max_context_tokens=CONTEXT) for plan in plans]


def other_future(plan: PlannedTrajectory, index: int, tail: Sequence[tuple[int, int, float]]) -> PlannedTrajectory:
    """The same up to the sampled tokens of step `index`; its observation, tool seconds and all behind are others."""
    step = plan.steps[index]
    (_, observed, seconds), *rest = tail
    changed = PlannedStep(step.generated_tokens, observed * 10, step.tool, seconds)
    behind = [PlannedStep(g * 10, o * 10, "tool", s) for g, o, s in rest]
    return replace(plan, steps=(*plan.steps[:index], changed, *behind, PlannedStep(70, 0, None, 0.0)))


def seen(strategy: tuple[str, list[str]], plans: Sequence[PlannedTrajectory]) -> list[tuple[ev.Event, str]]:
    """All events and commands, encoded."""
    lines: list[tuple[ev.Event, str]] = []

    def watch(event: ev.Event, commands: Any) -> None:
        lines.append((event, repr((encode(event), [encode(command) for command in commands]))))

    cost = replace(load_profile("qwen3-8b-h100"), capacity_tokens=6000)
    fleet = SimulatedFleet(
        equal_engines(2, cost, slots=4, max_context_tokens=CONTEXT),
        delays=ControlDelays.measured(6e-3, 4e-3),
    )
    preset, overrides = strategy
    simulate(preset, overrides, fleet, plans, seed=0, warm=fitted(drawn(900, 12)), watch=watch)
    return lines


def same_until_the_change(
    strategy: tuple[str, list[str]],
    plans: list[PlannedTrajectory],
    victim: int,
    at: int,
    tail: Sequence[tuple[int, int, float]],
) -> bool:
    """Whether all events and commands are equal up to the end of the step behind which the futures differ."""
    with_tool = [i for i, step in enumerate(plans[victim].steps) if step.tool is not None]
    index = with_tool[at % len(with_tool)]
    others = [*plans[:victim], other_future(plans[victim], index, tail), *plans[victim + 1 :]]
    ours, theirs = seen(strategy, fitted(plans)), seen(strategy, fitted(others))
    name = plans[victim].trajectory_id
    ends = [
        number
        for number, (event, _) in enumerate(ours)
        if isinstance(event, ev.StepFinished)
        and (event.step_id.trajectory_id, event.step_id.step_index) == (name, index)
        and event.finish_reason == "length"
    ]
    # In a short context the trajectory may end before that step: then nothing differs at all.
    shared = ends[-1] + 1 if ends else len(ours)
    return [line for _, line in ours[:shared]] == [line for _, line in theirs[:shared]]


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 50),
    victim=st.integers(0, 15),
    at=st.integers(0, 10),
    tail=TAILS,
    strategy=st.sampled_from(sorted(STRATEGIES)),
)
def test_another_future_of_a_trajectory_changes_nothing_before_it(
    seed: int, victim: int, at: int, tail: list[tuple[int, int, float]], strategy: str
) -> None:
    plans = drawn(seed, 4)
    if any(step.tool is not None for step in plans[victim].steps):
        assert same_until_the_change(STRATEGIES[strategy], plans, victim, at, tail)


def test_an_oracle_sees_another_future() -> None:
    """What the test above would find."""
    assert not same_until_the_change(ORACLE, drawn(1, 4), 5, 0, [(1, 10, 0.3), (800, 10, 0.3)])
