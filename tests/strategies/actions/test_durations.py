"""What is expected of an action: declared, or the mean of its kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from worlds.core_builders import action_of

from heddle_dask.core.nouns import ActionRequest, DurationProfile
from heddle_dask.core.resources import Resources
from heddle_dask.core.view import EndedAction
from heddle_dask.strategies.actions.durations import MAX_KINDS, UNKNOWN_S, Durations


def request(label: str = "tests", profile: DurationProfile | None = None) -> ActionRequest:
    return replace(action_of("a1", "a"), label=label, profile=profile)


def ended(label: str, run_s: float, ok: bool = True, cause: str = "") -> EndedAction:
    return EndedAction(request(label), Resources.of(cpus=1), run_s, ok, cause)


def test_a_declared_duration_is_used_as_it_is() -> None:
    durations = Durations()
    durations.observe(ended("tests", 100.0))
    assert durations.seconds(request(profile=DurationProfile(8.0)), 4) == 2.0
    assert durations.profile(request(profile=DurationProfile(8.0, 1.0))) is None, "more units do not help"
    assert durations.profile(request()) is None


def test_an_unknown_kind_is_expected_to_run_as_long_as_the_others() -> None:
    durations = Durations()
    assert durations.seconds(request(), 1) == UNKNOWN_S
    for seconds in (2.0, 4.0):
        durations.observe(ended("other", seconds))
    assert durations.seconds(request(), 1) == pytest.approx(3.0)
    durations.observe(ended("tests", 10.0))
    assert durations.seconds(request(), 1) == 10.0


def test_one_outlier_moves_the_mean_by_little_and_a_lasting_change_is_followed() -> None:
    durations = Durations()
    for _ in range(100):
        durations.observe(ended("tests", 1.0))
    durations.observe(ended("tests", 1e6))
    assert durations.seconds(request(), 1) < 1.1
    for _ in range(2000):
        durations.observe(ended("tests", 3.0))
    assert durations.seconds(request(), 1) == pytest.approx(3.0, rel=0.01)


def test_kinds_that_were_seen_last_are_kept() -> None:
    durations = Durations()
    for number in range(MAX_KINDS + 1):
        durations.observe(ended(f"kind {number}", 1.0))
    assert len(durations.kinds) == MAX_KINDS and "kind 0" not in durations.kinds
