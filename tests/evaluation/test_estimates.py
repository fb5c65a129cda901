"""Figures of an evaluation: pass@k against all subsets, samples apart from what is none, intervals over tasks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.record_builders import make_action, make_step, plain_trajectory, steady

from heddle_dask.evaluation.attempt_outcomes import AttemptOutcome, outcome_of
from heddle_dask.evaluation.estimates import arm_difference, evaluated_arm, ks_up_to, pass_at_k


def attempt(task: str, reward: float | None = 1.0, **facts: Any) -> AttemptOutcome:
    plain = outcome_of(plain_trajectory(0), domain="math/easy")
    return replace(plain, task_id=task, reward=reward, **facts)


@steady
@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_passed_attempt(samples: int, data: Any) -> None:
    passed, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    subsets = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_fewer_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@3 of 2 attempts"):
        pass_at_k(2, 1, 3)


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"reward": 1.0}, "passed"),
        ({"reward": 0.5}, "not-passed"),
        ({"reward": None}, "unknown"),
        ({"reward": None, "reward_cause": "not-finite"}, "unknown"),
        ({"reward": None, "reward_cause": "lost"}, "infrastructure"),
        ({"reward": None, "status": "failed", "cause": "agent"}, "not-passed"),
        ({"reward": None, "status": "truncated", "cause": "context"}, "not-passed"),
        ({"reward": None, "status": "failed", "cause": "engine"}, "infrastructure"),
        ({"reward": None, "status": "failed", "cause": "environment"}, "infrastructure"),
        ({"reward": None, "status": "aborted", "cause": "user"}, "infrastructure"),
        ({"reward": None, "status": "failed", "cause": "action", "last_action": "raised"}, "not-passed"),
        ({"reward": None, "status": "failed", "cause": "action", "last_action": "lost"}, "infrastructure"),
    ],
)
def test_an_attempt_says_something_of_the_agent_unless_the_infrastructure_ended_it(facts: Any, verdict: str) -> None:
    assert attempt("t", **facts).verdict() == verdict


def test_what_is_no_sample_is_not_counted_as_zero() -> None:
    lost = {"status": "failed", "cause": "engine", "detail": "engine e1 is lost"}
    arm = evaluated_arm(
        "a",
        [
            attempt("t0"),
            attempt("t0", 0.0),
            attempt("t0", None, **lost),
            attempt("t1"),
            attempt("t1", None, reward_cause="raised"),
            attempt("t1", None, status="failed", cause="agent", detail="KeyError: 'x'"),
            attempt("t2", None, **lost),
        ],
        ks=(1, 2, 4),
    )
    assert arm.overall.pass_at[1].mean == 0.5 and arm.overall.tasks == 2
    assert (arm.overall.samples, arm.overall.passed, arm.overall.unknown, arm.overall.infrastructure) == (4, 2, 1, 2)
    assert arm.overall.pass_at[2].mean == 1.0 and 4 not in arm.overall.pass_at
    assert arm.overall.reward is not None and arm.overall.reward.mean == 0.75 and arm.overall.rewards_known == 3
    assert [(each.title, each.count) for each in arm.of_the_infrastructure] == [("failed by engine", 2)]
    assert [(each.title, each.count) for each in arm.of_the_agent] == [("failed by agent", 1)]
    assert [(each.title, each.count) for each in arm.of_the_reward] == [("reward unknown by raised", 1)]
    assert arm.costs.attempts == 7
    assert not arm.by_domain


def test_intervals_are_over_tasks_and_not_over_attempts() -> None:
    """A hundred equal attempts at each of two tasks tell no more of other tasks than one at each."""
    one, hundred = (
        evaluated_arm("a", [attempt(f"t{task}", float(task)) for task in range(2) for _ in range(samples)])
        for samples in (1, 100)
    )
    assert one.overall.pass_at[1].bounds == hundred.overall.pass_at[1].bounds == (0.0, 1.0)


def test_domains_are_told_apart_and_the_threshold_is_the_users() -> None:
    outcomes = [attempt("t0", 0.5, domain="hard"), attempt("t1", 0.2)]
    arm = evaluated_arm("a", outcomes, passed_from=0.5)
    assert {name: each.pass_at[1].mean for name, each in arm.by_domain.items()} == {"hard": 1.0, "easy": 0.0}
    mixed = evaluated_arm("a", [replace(outcomes[0], environment="code"), outcomes[1]])
    assert set(mixed.by_domain) == {"code/hard", "math/easy"}


def test_two_arms_are_compared_task_by_task_where_both_have_samples() -> None:
    before = evaluated_arm("a", [attempt("t0", 0.0), attempt("t1", 0.0), attempt("t2")])
    after = evaluated_arm("b", [attempt("t0"), attempt("t1", 0.0), attempt("t9")])
    found = arm_difference(before, after)
    assert found is not None and (found[0].mean, found[1]) == (0.5, 2)
    assert arm_difference(before, evaluated_arm("c", [attempt("t8")])) is None


def test_costs_tell_the_engine_from_tools_also_where_the_agent_is_an_action() -> None:
    record = plain_trajectory(0, steps=0)
    step = replace(make_step(0, 0, 0, 0), submitted_s=2.0, finished_s=5.0, queue_s=1.0, prefill_s=math.nan)
    whole = replace(make_action(0), finished_s=9.0, run_s=9.0)
    record = replace(record, steps=(step,), actions=(whole,))
    outcome = outcome_of(record)
    assert (outcome.llm_s, outcome.queue_s, outcome.tool_s, outcome.wall_s) == (2.0, 1.0, 6.0, 10.0)


def test_ks_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [ks_up_to(n) for n in (1, 4, 6)] == [(1,), (1, 2, 4), (1, 2, 4, 6)]
