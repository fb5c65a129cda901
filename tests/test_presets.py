"""Presets build what they name; a bad name gets one line that says what is allowed."""

from __future__ import annotations

from dataclasses import is_dataclass

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.core.view import StrategySet
from heddle_dask.strategies.admission import AtMost, Unlimited
from heddle_dask.strategies.first_come import FirstComeFirstServed, FirstComeMinimum
from heddle_dask.strategies.least_load import LeastLoad
from heddle_dask.strategies.presets import PARTS, PRESETS, build_strategies
from heddle_dask.strategies.round_robin import RoundRobin
from heddle_dask.strategies.sticky import Sticky
from heddle_dask.strategies.sticky_least_loaded import StickyLeastLoaded

PLACEMENTS = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "sticky": Sticky,
    "sticky-least-loaded": StickyLeastLoaded,
}


def test_there_is_a_preset_for_every_placement() -> None:
    assert set(PRESETS) == set(PLACEMENTS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_placement_with_first_come_first_served(name: str) -> None:
    built = build_strategies(name)
    assert isinstance(built, StrategySet)
    assert type(built.placement) is PLACEMENTS[name]
    assert built.scheduling == FirstComeFirstServed()
    assert built.admission == Unlimited()
    assert built.actions == FirstComeMinimum()


def test_every_preset_names_existing_parts() -> None:
    for parts in PRESETS.values():
        assert set(parts) == set(PARTS)
        assert all(parts[part] in PARTS[part] for part in parts)
    assert all(is_dataclass(kind) for kinds in PARTS.values() for kind in kinds.values())


def test_two_builds_share_no_memory() -> None:
    one, two = build_strategies("round-robin"), build_strategies("round-robin")
    assert one.placement is not two.placement


def test_the_seed_reaches_the_strategies_that_draw() -> None:
    built = build_strategies("least-load", seed=42)
    assert isinstance(built.placement, LeastLoad)
    assert built.placement.seed == 42
    own = build_strategies("round-robin", seed=42, overrides=["placement=least-load,seed=5"])
    assert isinstance(own.placement, LeastLoad)
    assert own.placement.seed == 5, "an option that was given wins"


def test_overrides_replace_parts_and_the_last_of_one_part_wins() -> None:
    built = build_strategies(
        "sticky",
        overrides=["placement=round-robin", "admission=at-most,alive=3", "admission=at-most,alive=8"],
    )
    assert isinstance(built.placement, RoundRobin)
    assert built.admission == AtMost(8)


@pytest.mark.parametrize(
    ("preset", "override", "message"),
    [
        ("fastest", "", "unknown strategy 'fastest'; choose one of: round-robin, least-load, sticky, "),
        ("sticky", "plaicement=x", "unknown part 'plaicement'; choose one of: placement, scheduling, "),
        ("sticky", "placement=x", "unknown placement 'x'; choose one of: round-robin, "),
        ("sticky", "placement", "unknown placement ''; choose one of: round-robin, "),
        (
            "sticky",
            "admission=at-most",
            "admission 'at-most' needs the option 'alive': admission=at-most,alive=",
        ),
        ("sticky", "admission=at-most,alive", "'alive' is not of the form option=value"),
        ("sticky", "admission=at-most,alife=3", "'at-most' has no option 'alife'; its options: alive"),
        ("sticky", "admission=unlimited,alive=3", "has no option 'alive'; its options: none"),
        ("sticky", "admission=at-most,alive=0", "alive is 0; it must be a whole number from 1"),
        ("sticky", "admission=at-most,alive=many", "alive is 'many'; it must be a whole number from 1"),
        ("sticky", "placement=round-robin,_turn=3", "has no option '_turn'; its options: none"),
        (
            "sticky",
            "placement=least-load,seed=None",
            "placement 'least-load': seed is None; it must be a whole",
        ),
        ("sticky", "placement=sticky-least-loaded,seed=x", "seed is 'x'; it must be a whole number"),
    ],
)
def test_bad_input_gets_one_line_that_says_what_is_allowed(preset: str, override: str, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        build_strategies(preset, overrides=[override] if override else [])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
