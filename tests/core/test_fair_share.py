"""Turns of runs: weights hold when all are saturated, nothing lies idle, nobody starves, idle time is not repaid."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.fair_share import SLOTS, FairShare
from heddle_dask.core.ids import RunId


@dataclass(frozen=True)
class Load:
    """What one run wants: steps of so many seconds; `wants_at_s`, and `until_s`, when it has steps that wait."""

    weight: float
    step_s: float
    wants_at_s: float = 0.0
    until_s: float = 1e9


def served(loads: dict[str, Load], slots: int, end_s: float) -> tuple[dict[str, float], float]:
    """Seconds of slots that each run gets by turns, and the idle ones while somebody waits: there are none."""
    fair = FairShare()
    for name, load in loads.items():
        fair.join(RunId(name), load.weight)
    got = dict.fromkeys(loads, 0.0)
    ends: list[tuple[float, int, str]] = []
    waited: set[str] = set()
    now_s, number = 0.0, 0
    changes = sorted({0.0, *(load.wants_at_s for load in loads.values())})
    while now_s < end_s:
        waiting = {n for n, load in loads.items() if load.wants_at_s <= now_s < load.until_s}
        for name in sorted(waiting - waited):
            fair.begins_to_wait(RunId(name), [RunId(other) for other in waited])
        waited = waiting
        while waiting and len(ends) < slots:
            (first, *_) = fair.in_turn([RunId(name) for name in waiting])
            number += 1
            fair.start(str(number), first, SLOTS, {SLOTS: 1 / slots}, now_s)
            heapq.heappush(ends, (now_s + loads[first].step_s, number, first))
            got[first] += max(0.0, min(end_s, now_s + loads[first].step_s) - now_s)
        later = [at for at in changes if at > now_s]
        at_s = min([ends[0][0]] if ends else later, default=end_s)
        at_s = min([at_s, *later])
        now_s = at_s
        while ends and ends[0][0] <= now_s:
            _, ended, _ = heapq.heappop(ends)
            fair.end(str(ended), now_s)
    return got, number


@settings(deadline=None, max_examples=20)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0]), min_size=2, max_size=4),
    lengths=st.lists(st.sampled_from([0.3, 1.0, 2.7, 9.0]), min_size=4, max_size=4),
    slots=st.integers(1, 12),
)
def test_saturated_runs_get_slots_by_their_weights(weights: list[float], lengths: list[float], slots: int) -> None:
    loads = {f"r{i}": Load(w, s) for i, (w, s) in enumerate(zip(weights, lengths, strict=False))}
    end_s = 1500.0
    got, _ = served(loads, slots, end_s)
    assert sum(got.values()) == pytest.approx(slots * end_s), "a slot was idle while runs waited"
    for name, load in loads.items():
        share = load.weight / sum(weights)
        assert got[name] / (slots * end_s) == pytest.approx(share, rel=0.1)


def test_a_third_slot_that_does_not_divide_goes_round() -> None:
    got, _ = served({"a": Load(1, 1.0), "b": Load(3, 1.0)}, slots=3, end_s=400.0)
    assert got["b"] / got["a"] == pytest.approx(3.0, rel=0.02)


def test_idle_time_is_lent_and_not_repaid() -> None:
    loads = {"a": Load(1, 1.0), "b": Load(1, 1.0, wants_at_s=500.0)}
    alone, _ = served(loads, 4, 500.0)
    assert alone == {"a": pytest.approx(2000.0), "b": 0.0}, "what nobody wants is lent"
    both, _ = served(loads, 4, 1500.0)
    assert both["b"] == pytest.approx(2000.0, rel=0.02), "half of the time since it came, and not more"


def test_the_resource_of_which_a_run_uses_most_decides() -> None:
    """The example of the paper: 9 CPUs and 18 GB, tasks of 1 CPU and 4 GB against 3 CPUs and 1 GB: 3 and 2 of them."""
    fair, needs = FairShare(), {"a": {"cpu": 1 / 9, "memory": 4 / 18}, "b": {"cpu": 3 / 9, "memory": 1 / 18}}
    for name in needs:
        fair.join(RunId(name), 1.0)
    used = {"cpu": 0.0, "memory": 0.0}
    started = dict.fromkeys(needs, 0)
    while True:
        (first, *_) = fair.in_turn([RunId(name) for name in needs])
        if any(used[r] + share > 1 + 1e-9 for r, share in needs[first].items()):
            break
        for resource, share in needs[first].items():
            used[resource] += share
        started[first] += 1
        fair.start(f"{first} {started[first]}", first, "task", needs[first], 0.0)
    assert started == {"a": 3, "b": 2}


def test_memory_that_is_held_is_paid_for_over_time() -> None:
    fair = FairShare()
    for name in ("a", "b"):
        fair.join(RunId(name), 1.0)
    fair.holds(RunId("a"), {"kv": 0.5}, 0.0)
    fair.holds(RunId("a"), {"kv": 0.0}, 10.0)
    fair.holds(RunId("a"), {"kv": 0.0}, 99.0)
    assert fair.turn(RunId("a")) == pytest.approx(5.0)
    assert fair.in_turn([RunId("a"), RunId("b")]) == ["b", "a"]
