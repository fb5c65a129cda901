"""Durations by kind: learned with their uncertainty, declared ones first; failures are no durations."""

from __future__ import annotations

import random

import pytest

from heddle_dask.core.ids import ActionId, TrajectoryId
from heddle_dask.core.nouns import ActionRequest, DurationProfile
from heddle_dask.core.resources import Amounts, ResourceDemand
from heddle_dask.core.view import EndedAction
from heddle_dask.strategies.actions.durations import MAX_KINDS, Durations, KindDuration


def request(label: str = "tests", profile: DurationProfile | None = None) -> ActionRequest:
    demand = ResourceDemand.of(cpus=Amounts(1, 8))
    return ActionRequest(ActionId("a"), TrajectoryId("t"), "tool", label, demand, profile=profile)


def ended(units: int, seconds: float, ok: bool = True, cause: str = "", label: str = "tests") -> EndedAction:
    asked = request(label)
    return EndedAction(asked, asked.demand.with_units(units), seconds, ok, cause)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("noise", [0.05, 0.8])
def test_the_law_is_learned_from_noisy_seconds(share: float, noise: float) -> None:
    rng, truth, kind = random.Random(1), DurationProfile(20.0, share), KindDuration()
    for number in range(600):
        units = (1, 2, 4, 8)[number % 4]
        kind.observe(units, truth.seconds(units) * rng.lognormvariate(-noise * noise / 2, noise))
    for units in (1, 3, 8):
        assert kind.seconds(units) == pytest.approx(truth.seconds(units), rel=0.3 if noise > 0.1 else 0.03)
    assert kind.serial_share() == pytest.approx(share, abs=0.25 if noise > 0.1 else 0.05)


def test_little_evidence_of_a_speed_up_counts_as_less_of_it() -> None:
    few, many = KindDuration(), KindDuration()
    rng, truth = random.Random(2), DurationProfile(10.0, 0.1)
    for number in range(200):
        units = (1, 8)[number % 2]
        seconds = truth.seconds(units) * rng.lognormvariate(0, 0.6)
        many.observe(units, seconds)
        if number < 6:
            few.observe(units, seconds)
    assert few.serial_share() > many.serial_share()


def test_an_outlier_moves_the_expectation_little() -> None:
    kind = KindDuration()
    for _ in range(50):
        kind.observe(1, 1.0)
    kind.observe(1, 10_000.0)
    seconds = kind.seconds(1)
    assert seconds is not None and seconds < 1.2


def test_a_declared_profile_is_used_whatever_was_measured() -> None:
    durations = Durations(trials=4)
    for _ in range(20):
        durations.observe(ended(1, 100.0))
    declared = DurationProfile(8.0, 0.5)
    assert durations.profile(request(profile=declared)) == declared
    assert durations.seconds(request(profile=declared), 4) == 5.0
    assert durations.profile(request(profile=DurationProfile(8.0, 1.0))) is None, "no speed-up"
    assert durations.trial_units(request(profile=declared), range(1, 9)) is None


def test_failures_and_rate_limits_are_counted_and_are_no_durations() -> None:
    durations = Durations(trials=4)
    durations.observe(ended(1, 3.0))
    durations.observe(ended(1, 900.0, ok=False, cause="timeout"))
    durations.observe(ended(1, 0.01, ok=False, cause="rate-limited"))
    kind = durations.kinds["tests"]
    assert (kind.observed, kind.failed, kind.refused) == (1, 1, 1)
    assert durations.seconds(request(), 1) == 3.0


def test_an_unknown_kind_is_expected_to_take_what_others_take() -> None:
    durations = Durations(trials=4)
    assert durations.seconds(request(), 1) == 1.0
    durations.observe(ended(1, 7.0))
    assert durations.seconds(request("other"), 1) == 7.0


def test_trials_are_bounded_take_turns_and_end_in_a_profile() -> None:
    durations, truth = Durations(trials=6), DurationProfile(16.0)
    tried = []
    for _ in range(60):
        units = durations.trial_units(request(), range(1, 9))
        tried.append(units or 1)
        durations.observe(ended(units or 1, truth.seconds(units or 1)))
    assert sum(units > 1 for units in tried) == 6
    assert set(tried) == {1, 2, 4, 8}
    profile = durations.profile(request())
    assert profile is not None and profile.serial_share < 0.1
    assert Durations(trials=0).trial_units(request(), range(1, 9)) is None


def test_a_kind_without_a_speed_up_gets_no_profile() -> None:
    durations = Durations(trials=40)
    for _ in range(400):
        units = durations.trial_units(request(), range(1, 9)) or 1
        durations.observe(ended(units, 5.0))
    profile = durations.profile(request())
    assert profile is None or profile.seconds(1) / profile.seconds(8) < 1.1


def test_memory_is_bounded_and_the_latest_kinds_stay() -> None:
    durations = Durations(trials=0)
    for number in range(MAX_KINDS + 50):
        durations.observe(ended(1, 1.0, label=f"k{number}"))
    assert len(durations.kinds) == MAX_KINDS
    assert f"k{MAX_KINDS + 49}" in durations.kinds
