"""Credits against a plain recount, and the promise of the mode `pace` against a trainer that takes the oldest first."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.ids import GroupId, PolicyVersion, TrajectoryId
from heddle_dask.core.run_description import StalenessBound, StalenessMode
from heddle_dask.core.run_record import CreditLedger


class Accounts:
    """What the ledger should hold, member by member."""

    def __init__(self, bound: StalenessBound) -> None:
        self.ledger = CreditLedger(bound)
        self.waits: dict[str, list[str]] = {}
        self.runs: dict[str, list[str]] = {}
        self.over: dict[str, list[str]] = {}
        self.accepted = 0
        self.steps = 0

    def grant(self) -> None:
        for name in self.ledger.grant():
            group = name.split("/")[0]
            self.waits[group].remove(name)
            self.runs.setdefault(group, []).append(name)

    def check(self) -> None:
        self.ledger.check_integrity()
        running = sum(map(len, self.runs.values())) + sum(map(len, self.over.values()))
        bound = self.ledger.bound
        assert self.ledger.running == running >= 0
        assert self.ledger.accepted == self.accepted
        most = (bound.alpha + self.steps + 1) * bound.batch_trajectories
        assert self.ledger.credits + running + self.accepted == most


@settings(deadline=None, max_examples=50)
@given(st.data(), st.integers(0, 3), st.integers(1, 6))
def test_credits_are_conserved(data: st.DataObject, alpha: int, batch: int) -> None:
    accounts = Accounts(StalenessBound(alpha, "cancel", batch))
    accounts.ledger.step_ended(PolicyVersion("a", 5))
    for number in range(data.draw(st.integers(5, 40))):
        moves = ["submit", "step"]
        moves += ["end", "lose"] if any(accounts.runs.values()) else []
        moves += ["report"] if accounts.over else []
        match data.draw(st.sampled_from(moves)):
            case "submit":
                size = data.draw(st.integers(1, 4))
                group = f"g{number}"
                accounts.waits[group] = [f"{group}/{i}" for i in range(size)]
                for name in list(accounts.waits[group]):
                    accounts.ledger.submitted(GroupId(group), TrajectoryId(name))
                accounts.grant()
            case "step":
                accounts.steps += 1
                assert accounts.ledger.step_ended(PolicyVersion("a", 5 + accounts.steps))
                accounts.grant()
            case "report":
                group = data.draw(st.sampled_from(sorted(accounts.over)))
                accepted = data.draw(st.integers(0, len(accounts.over[group])))
                del accounts.over[group]
                accounts.accepted += accepted
                late = accounts.runs.pop(group, [])
                accounts.ledger.group_ended(GroupId(group), accepted)
                for name in late:  # they end later, and count no more
                    accounts.ledger.ended(GroupId(group), TrajectoryId(name), useless=False)
                accounts.grant()
            case how:
                group = data.draw(st.sampled_from(sorted(g for g, names in accounts.runs.items() if names)))
                name = accounts.runs[group].pop()
                if how == "end":
                    accounts.over.setdefault(group, []).append(name)
                accounts.ledger.ended(GroupId(group), TrajectoryId(name), useless=how == "lose")
                accounts.grant()
        accounts.check()


def play(mode: StalenessMode, alpha: int, groups_of_batch: int, seed: int) -> list[int]:
    """Ages at training of a run with random speeds; the trainer takes the groups in the order of their credits."""
    size, rng = 3, random.Random(seed)
    ledger = CreditLedger(StalenessBound(alpha, mode, size * groups_of_batch))
    version, installed, submitted = PolicyVersion("a", 0), 0, 0
    ledger.step_ended(version)
    waiting: list[str] = []
    running: dict[str, int] = {}
    done: dict[str, int] = {}
    order: deque[str] = deque()
    ages = []
    for _ in range(400):
        if len(waiting) < 3:
            name = f"g{submitted}"
            submitted += 1
            for member in range(size):
                ledger.submitted(GroupId(name), TrajectoryId(f"{name}/{member}"))
        for member in ledger.grant():
            name = member.split("/")[0]
            if name not in waiting:
                waiting.append(name)
                order.append(name)
        for name in list(waiting):
            if ledger.may_begin(GroupId(name), PolicyVersion("a", installed)) and rng.random() < 0.7:
                waiting.remove(name)
                running[name] = installed
        for name in [n for n in running if rng.random() < 0.3]:
            done[name] = running.pop(name)
            for member in range(size):
                ledger.ended(GroupId(name), TrajectoryId(f"{name}/{member}"), useless=False)
            if rng.random() < 0.2:  # without variance
                ledger.group_ended(GroupId(name), 0)
                order.remove(name)
                del done[name]
            else:
                ledger.group_ended(GroupId(name), size)
        batch = list(order)[:groups_of_batch]
        if len(batch) == groups_of_batch and all(name in done for name in batch) and rng.random() < 0.5:
            for name in batch:
                ages.append(version.number - done.pop(name))
                order.remove(name)
            version = PolicyVersion("a", version.number + 1)
            ledger.step_ended(version)
        if rng.random() < 0.3:
            installed = version.number
    return ages


def test_pace_trains_nothing_that_is_too_old_and_never_stops() -> None:
    for alpha in range(4):
        for groups in (1, 2, 5):
            for seed in range(2):
                ages = play("pace", alpha, groups, seed)
                assert len(ages) >= 10, "the training goes on"
                assert max(ages) <= alpha
    assert max(play("cancel", 1, 5, 0)) > 1, "credits alone do not keep the bound where weights come late"


def test_redundant_members_take_no_place_of_a_batch() -> None:
    """Four groups of three with one more member each fill two batches of six, not three."""
    bound = StalenessBound(alpha=1, mode="pace", batch_trajectories=6, redundant_trajectories=2)
    assert [bound.next_place(0, 4 * running) for running in range(5)] == [0, 0, 1, 1, 2]
    assert [bound.next_place(6, 4 * running) for running in range(5)] == [1, 1, 2, 2, 3]
    assert StalenessBound(1, "pace", 6).next_place(3, 8) == 1


def test_a_group_keeps_its_place_when_the_trainer_comes_back_behind_it() -> None:
    ledger = CreditLedger(StalenessBound(0, "pace", 1))
    ledger.step_ended(PolicyVersion("a", 5))
    ledger.submitted(GroupId("g"), TrajectoryId("g/0"))
    assert list(ledger.grant()) == ["g/0"]
    assert not ledger.may_begin(GroupId("g"), PolicyVersion("a", 4))
    ledger.step_ended(PolicyVersion("b", 3))
    assert ledger.may_begin(GroupId("g"), PolicyVersion("b", 3)), "no step can follow before it is trained on"
