"""Rewards, runs and their names in the history: against plain sums, and in what views show."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.core.ids import EngineId, GroupId, StepId, TrajectoryId
from heddle_dask.core.nouns import NORMAL, EngineDescription, StepRequest, TrajectorySpec
from heddle_dask.core.run_record import qualified
from heddle_dask.views.history import reward_history
from heddle_dask.views.history.history_pictures import picture_of, picture_of_run
from heddle_dask.views.history.reward_history import RewardTally
from heddle_dask.views.history.run_history import RunHistory
from heddle_dask.views.history.run_shares import RunShare

REWARDS = st.one_of(st.none(), st.just(math.nan), st.sampled_from([0.0, 1.0]), st.floats(-1e6, 1e6))


@given(st.lists(st.tuples(st.sampled_from("abcde"), REWARDS), max_size=60))
def test_the_tally_is_what_plain_sums_say(ended: list[tuple[str, float | None]]) -> None:
    tally = RewardTally()
    groups: dict[str, list[float]] = defaultdict(list)
    for group, reward in ended:
        tally.add(group, reward)
        if reward is not None and math.isfinite(reward):
            groups[group].append(reward)
    known = [reward for rewards in groups.values() for reward in rewards]
    view = tally.view()
    assert (view.known, view.unknown) == (len(known), len(ended) - len(known))
    if not known:
        assert view.line() == "" and view.mean is view.spread is view.solved_share is view.flat_share is None
        return
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    assert view.mean == pytest.approx(statistics.fmean(known), abs=1e-6)
    assert view.spread == pytest.approx(statistics.pstdev(known), abs=1e-4)
    assert view.solved_share == sum(reward >= 1 for reward in known) / len(known)
    assert (view.groups, view.flat_groups) == (len(several), sum(len(set(rewards)) == 1 for rewards in several))


def test_the_memory_of_the_tally_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_history, "MOST_OPEN_GROUPS", 10)
    tally = RewardTally()
    for number in range(100):
        tally.add(f"g{number}", 1.0)
        tally.add(f"g{number}", float(number % 2))
    assert len(tally._groups) == 10
    assert (tally.view().groups, tally.view().flat_groups) == (100, 50)


def ended(history: RunHistory, run_id: str, number: int, reward: float | None) -> None:
    name = qualified(run_id, f"t{number}")
    spec = TrajectorySpec(TrajectoryId(name), GroupId(qualified(run_id, f"g{number // 2}")), run_id=run_id)
    history.take(ev.TrajectorySubmitted(1.0, spec), [cmd.AdmitTrajectory(spec.trajectory_id)])
    history.tell_end(spec.trajectory_id, "", reward)
    history.take(ev.TrajectoryEnded(2.0, spec.trajectory_id, "completed"), [])


def test_a_picture_of_one_run_has_its_trajectories_and_rewards_alone() -> None:
    history = RunHistory()
    for number in range(4):
        ended(history, "1", number, 1.0)
        ended(history, "2", number, None if number == 3 else 0.0)
    shares = [
        RunShare(f"s{run}", "heddle", 1.0, 0, 0, 0, 0, run, name, "math", 4, dict(totals.ended), totals.rewards.view())
        for (run, totals), name in zip(history.runs.items(), ("train", "eval"), strict=True)
    ]
    whole = picture_of(history, session="s1", is_open=True, strategy="heddle", now_s=2.0, runs=tuple(shares))
    assert (whole.rewards.known, whole.rewards.mean, whole.title) == (7, 4 / 7, "train (math), eval (math)")
    of_eval = picture_of_run(whole, "eval")
    assert [each.trajectory_id for each in of_eval.latest_ended] == [qualified("2", f"t{n}") for n in (3, 2, 1, 0)]
    assert (of_eval.counts.submitted, of_eval.counts.ended, of_eval.rewards.mean) == (4, {"completed": 4}, 0.0)
    assert of_eval.rewards.flat_groups == 1 and of_eval.only == "eval"
    assert picture_of_run(whole, "s2").latest_ended == of_eval.latest_ended
    with pytest.raises(KeyError):
        picture_of_run(whole, "nothing")
    history.take(ev.RunEnded(3.0, "2"), [])
    assert list(history.runs) == ["1"]


def test_what_the_infrastructure_moves_is_counted_apart() -> None:
    history = RunHistory()
    for name in ("a", "b"):
        history.take(ev.EngineJoined(0.0, EngineDescription(EngineId(name), 4, 4096)), [])
    reasons = {
        "taken by the idle b": 1,
        "its engine drains": 1,
        "another run joins": 1,
        "cancelled by its program": 0,
        f"{cmd.PREEMPTED_FOR}t0": 0,
    }
    for number, reason in enumerate(reasons):
        name = TrajectoryId(f"t{number}")
        step = StepId(name, 0, 0)
        spec = TrajectorySpec(name, GroupId("g"))
        history.take(ev.TrajectorySubmitted(1.0, spec), [cmd.AdmitTrajectory(name)])
        start = cmd.StartStep(step, EngineId("a"), NORMAL, number)
        history.take(ev.StepRequested(2.0, StepRequest(step, 100, 50)), [start])
        history.take(ev.StepStarted(2.5, step, EngineId("a")), [cmd.AbortStep(step, EngineId("a"), reason)])
    assert (history.requeues, history.preemptions) == (3, 1)
    moves = [cmd.MoveContext(TrajectoryId("t0"), EngineId("a"), EngineId("b"), "recompute")]
    history.take(ev.TimeReached(3.0), moves)
    history.take(ev.EngineDraining(4.0, EngineId("a"), 60.0), moves)
    (counts,) = history.engines.moves.values()
    assert (counts.started, counts.from_leaving) == (2, 1)
    history.take(ev.EngineLost(5.0, EngineId("a"), "its worker died", True), [])
    assert history.requeues == 3 + len(reasons), "each waits again"
