"""Which groups run, count and are cancelled: by hand, and against invariants over random ends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.record_builders import plain_trajectory, steady

from heddle_dask.core.errors import BadInput
from heddle_dask.records.trajectory import Cause, Status, TrajectoryRecord
from heddle_dask.training.group_ledger import (
    CancelMember,
    DeliverGroup,
    DropGroup,
    GroupLedger,
    GroupStart,
    LedgerDecision,
)
from heddle_dask.training.groups import FinishedGroup, GroupPlan

PLAIN = plain_trajectory(0)
TOKENS = 15


def record(name: str, status: Status = "completed", cause: Cause = "") -> TrajectoryRecord:
    reward = 1.0 if status == "completed" else None
    return replace(PLAIN, trajectory_id=name, status=status, cause=cause, reward=reward)


def started(ledger: GroupLedger, plan: GroupPlan, position: int, repeat: int = 0) -> list[str]:
    start = GroupStart(position, repeat)
    names = [f"{start.group_id}/{n}" for n in range(plan.attempts)]
    ledger.start(start, f"task-{position}", "env", names)
    return names


def cancelled(decisions: list[LedgerDecision]) -> list[tuple[str, str]]:
    return [(each.trajectory_id, each.cause) for each in decisions if isinstance(each, CancelMember)]


def delivered(decisions: list[LedgerDecision]) -> list[FinishedGroup]:
    return [each.group for each in decisions if isinstance(each, DeliverGroup)]


def test_the_first_members_to_end_count() -> None:
    plan = GroupPlan(members=2, extra_members=1)
    ledger = GroupLedger(plan)
    a, b, c = started(ledger, plan, 0)
    assert ledger.ended(record(c)) == []
    assert cancelled(ledger.ended(record(a))) == [(b, "redundant")]
    (group,) = delivered(ledger.ended(record(b, "aborted", "redundant")))
    assert [each.trajectory_id for each in group.records] == [c, a]
    assert group.cancelled_tokens == {"redundant": TOKENS} == ledger.wasted_tokens
    assert not ledger._groups and ledger.counted == 1


def test_what_a_cancelled_step_had_sampled_is_waste_too() -> None:
    plan = GroupPlan(members=1, extra_members=2)
    ledger = GroupLedger(plan)
    a, b, c = started(ledger, plan, 0)
    ledger.ended(record(a), dropped_tokens=9)  # its program gave a step up, and came to its end
    ledger.ended(record(b, "aborted", "redundant"), dropped_tokens=3)
    ledger.ended(record(c, "aborted", "redundant"))
    assert ledger.wasted_tokens == {"redundant": 2 * TOKENS + 3}
    for name, tokens in ((b, 5), (b, 50), (a, 50)):
        ledger.discarded(name, tokens)
    assert ledger.wasted_tokens == {"redundant": 2 * TOKENS + 8}, "one step of each, and none of a"


def test_late_members_are_kept() -> None:
    plan = GroupPlan(members=2, extra_members=2, late_members="keep")
    ledger = GroupLedger(plan)
    a, b, c, d = started(ledger, plan, 0)
    ledger.ended(record(a))
    (whole,) = delivered(ledger.ended(record(b)))
    assert [each.trajectory_id for each in whole.records] == [a, b]
    assert ledger.ended(record(d)) == []
    (late,) = delivered(ledger.ended(record(c)))
    assert (late.late_for, late.group_id) == (whole.group_id, f"{whole.group_id}+late")
    assert [each.trajectory_id for each in late.records] == [d, c]
    assert ledger.counted == 2 and not ledger.wasted_tokens


def test_extra_groups_are_redundant_when_the_batch_is_full() -> None:
    plan = GroupPlan(members=1, groups_per_batch=2, extra_groups=1)
    ledger = GroupLedger(plan)
    ledger.open_batches(1)
    names = [name for position in range(3) for name in started(ledger, plan, position)]
    assert not ledger.wants_group()
    ledger.ended(record(names[2]))
    assert cancelled(ledger.ended(record(names[1]))) == [(names[0], "redundant")]
    assert not ledger.wants_group()
    (dropped,) = ledger.ended(record(names[0], "aborted", "redundant"))
    assert isinstance(dropped, DropGroup) and dropped.cause == "redundant"
    ledger.open_batches(2)
    assert ledger.wants_group()


def test_a_stale_group_is_asked_for_again_and_given_up_in_the_end() -> None:
    plan = GroupPlan(members=2, max_repeats=1)
    ledger = GroupLedger(plan)
    a, b = started(ledger, plan, 7)
    assert cancelled(ledger.ended(record(a, "aborted", "stale"))) == [(b, "stale")]
    assert ledger.repeats == [GroupStart(7, 1)]
    ledger.ended(record(b))  # it came to its end before it heard of it
    assert ledger.wasted_tokens == {"stale": 2 * TOKENS} and not ledger._groups
    a, b = started(ledger, plan, 7, ledger.repeats.pop().repeat)
    ledger.ended(record(a, "aborted", "stale"))
    assert not ledger.repeats and ledger.given_up == 1


def test_a_failed_environment_drops_its_group_and_a_failed_agent_does_not() -> None:
    plan = GroupPlan(members=2, extra_members=1)
    ledger = GroupLedger(plan)
    a, b, c = started(ledger, plan, 0)
    ledger.ended(record(a))
    assert cancelled(ledger.ended(record(b, "failed", "environment"))) == [(c, "environment")]
    (dropped,) = ledger.ended(record(c, "aborted", "environment"))
    assert isinstance(dropped, DropGroup) and dropped.cause == "environment"
    a, b, c = started(ledger, plan, 1)
    assert ledger.ended(record(a, "failed", "agent")) == []
    assert ledger.ended(record(b)) == []
    (group,) = delivered(ledger.ended(record(c)))
    assert [each.status for each in group.records] == ["failed", "completed", "completed"]


def test_a_group_whose_prefix_cannot_be_replayed_is_asked_for_again() -> None:
    plan = GroupPlan(members=2, max_repeats=0)
    ledger = GroupLedger(plan)
    start = GroupStart(7, continuation=1)
    assert (start.group_id, start.again().group_id) == ("g000007c1", "g000007c1.1")
    ledger.start(start, "task-7", "env", ["a", "b"])
    assert cancelled(ledger.ended(record("a", "failed", "prefix"))) == [("b", "prefix")]
    (dropped,) = ledger.ended(record("b", "aborted", "prefix"))
    assert isinstance(dropped, DropGroup) and dropped.cause == "prefix"
    assert ledger.repeats == [start.again()]


def test_a_group_that_does_not_count_is_replaced() -> None:
    plan = GroupPlan(members=1, groups_per_batch=1)
    ledger = GroupLedger(plan, counts=lambda group: group.task_id != "task-0")
    ledger.open_batches(1)
    (name,) = started(ledger, plan, 0)
    assert not ledger.wants_group()
    ledger.ended(record(name))
    assert ledger.wants_group()
    (name,) = started(ledger, plan, 1)
    ledger.ended(record(name))
    assert not ledger.wants_group()
    ledger.evicted(1)
    assert ledger.wants_group()


ENDS: list[tuple[Status, Cause]] = [
    *[("completed", "")] * 4,
    ("truncated", "time"),
    ("failed", "agent"),
    ("failed", "environment"),
    ("aborted", "stale"),
]


@steady
@given(
    plan=st.builds(
        GroupPlan,
        members=st.integers(1, 3),
        extra_members=st.integers(0, 2),
        groups_per_batch=st.integers(1, 3),
        extra_groups=st.integers(0, 2),
        late_members=st.sampled_from(["cancel", "keep"]),
    ),
    seed=st.integers(0, 10_000),
)
def test_no_token_is_lost_or_counted_twice(plan: GroupPlan, seed: int) -> None:
    draw = random.Random(seed)
    ledger = GroupLedger(plan, counts=lambda group: len(group.records) > 0 and seed % 3 != len(group.group_id))
    ledger.open_batches(draw.randint(1, 3))
    running: dict[str, str] = {}
    order: dict[str, list[str]] = {}
    ended = kept = position = 0
    seen: set[str] = set()
    while ended < 200:
        while ledger.wants_group() and len(running) < 30:
            start = ledger.repeats.pop(0) if ledger.repeats else GroupStart(position)
            position += start.repeat == 0
            names = [f"{start.group_id}/{n}" for n in range(plan.attempts)]
            ledger.start(start, f"task-{start.position}", "env", names)
            running |= dict.fromkeys(names, "")
        if not running:
            break
        name = draw.choice(sorted(running))
        cause = running.pop(name)
        finishes_anyway = draw.random() < 0.2
        end: tuple[Status, Cause]
        end = ("aborted", cause) if cause and not finishes_anyway else draw.choice(ENDS)  # type: ignore[assignment]
        ended += 1
        if end[0] in ("completed", "truncated"):
            order.setdefault(name.partition("/")[0], []).append(name)
        for decision in ledger.ended(record(name, *end)):
            match decision:
                case CancelMember(other, why):
                    assert other in running
                    running[other] = running[other] or why
                case DeliverGroup(group, _):
                    assert group.group_id not in seen
                    seen.add(group.group_id)
                    kept += len(group.records)
                    complete = [r.trajectory_id for r in group.records if r.status != "failed"]
                    first = order.get(group.group_id, [])[: plan.members]
                    assert group.late_for or complete == first
                case DropGroup(group_id):
                    assert group_id not in seen
    while running:
        name, cause = running.popitem()
        for decision in ledger.ended(record(name, "aborted", "redundant")):
            if isinstance(decision, DeliverGroup):
                kept += len(decision.group.records)
        ended += 1
    unfinished = TOKENS * ended - TOKENS * kept - sum(ledger.wasted_tokens.values())
    assert unfinished == 0
    assert not ledger._groups
    if plan.late_members == "cancel":
        assert all(group_id.count("+") == 0 for group_id in seen)


@pytest.mark.parametrize("given_", [{"members": 0}, {"members": 2, "extra_groups": -1}, {"members": True}])
def test_plans_that_cannot_be(given_: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        GroupPlan(**given_)
    with pytest.raises(BadInput, match="max_running is 3"):
        GroupPlan(members=4, max_running=3)
