"""Presets build what they name; a bad name gets one line that says what is allowed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.core.view import PredictorChoice, StrategySet
from heddle_dask.strategies.actions.elastic import ElasticUnits
from heddle_dask.strategies.admission.at_most import AtMost, Unlimited
from heddle_dask.strategies.admission.kv_fit import KvFit
from heddle_dask.strategies.admission.kv_forecast import KvForecast
from heddle_dask.strategies.migration.priced import Priced
from heddle_dask.strategies.migration.rank_rule import RankRule
from heddle_dask.strategies.placement.cache_aware import CacheAware
from heddle_dask.strategies.placement.least_load import LeastLoad
from heddle_dask.strategies.placement.presorted import PresortedPlan
from heddle_dask.strategies.placement.round_robin import RoundRobin
from heddle_dask.strategies.placement.sticky import Sticky, StickyByCount, StickyLeastLoaded
from heddle_dask.strategies.preemption import Hysteresis
from heddle_dask.strategies.presets import (
    PARTS,
    PRESETS,
    Strategy,
    build_strategies,
)
from heddle_dask.strategies.scheduling import FirstComeFirstServed, GroupFirst, LeastAttained, LongestFirst

BASELINES: dict[str, type] = {
    "least-load": LeastLoad,
    "sticky": Sticky,
    "sticky-least-loaded": StickyLeastLoaded,
    "cache-aware": CacheAware,
    "slime": LeastLoad,
    "verl": StickyByCount,
    "verl-hybrid": CacheAware,
    "autellix": StickyLeastLoaded,
}


def test_the_presets_are_the_baselines_and_heddle_as_we_and_as_the_paper_have_it() -> None:
    assert set(PRESETS) == {*BASELINES, "sticky-forecast", "heddle", "heddle-paper"}


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_its_placement_with_the_order_of_its_original_and_nothing_of_heddle(name: str) -> None:
    built = build_strategies(name)
    assert type(built.placement) is BASELINES[name]
    order = LeastAttained() if name == "autellix" else FirstComeFirstServed()
    assert built.scheduling == order
    assert built.admission == (AtMost(per_engine=512) if name == "slime" else Unlimited())
    assert built.actions == ElasticUnits()
    assert built.preemption == (Hysteresis(least_wait_tokens=0) if name == "autellix" else None)
    assert (built.migration, built.predictor) == (None, None)


def test_sticky_forecast_is_the_router_behind_an_admission_and_needs_no_training_data() -> None:
    built = build_strategies("sticky-forecast", seed=3)
    assert isinstance(built.placement, StickyLeastLoaded)
    assert built.admission == KvForecast()
    assert built.scheduling == FirstComeFirstServed()
    assert (built.preemption, built.migration, built.predictor) == (None,) * 3


def test_heddle_has_every_mechanism() -> None:
    built = build_strategies("heddle", seed=3)
    assert isinstance(built.placement, StickyLeastLoaded)
    assert built.scheduling == LongestFirst()
    assert built.preemption == Hysteresis()
    assert isinstance(built.migration, Priced)
    assert isinstance(built.admission, KvFit)
    assert built.predictor is not None and built.predictor.name == "xgboost"


def test_heddle_paper_is_as_printed() -> None:
    built = build_strategies("heddle-paper")
    assert isinstance(built.placement, PresortedPlan)
    assert built.scheduling == LongestFirst("remaining", "median", tools=False)
    assert built.preemption == Hysteresis(ratio=1.0, margin_tokens=0, least_wait_tokens=0)
    assert isinstance(built.migration, RankRule)
    assert built.migration.plan is built.placement, "it scales the sizes of that plan"
    assert built.admission == Unlimited()


def test_the_rank_rule_follows_an_override_of_the_placement_with_options() -> None:
    built = build_strategies("heddle-paper", overrides=["placement=presorted,quantile=q90"])
    assert isinstance(built.migration, RankRule) and isinstance(built.placement, PresortedPlan)
    assert built.migration.plan is built.placement
    assert built.placement.quantile == "q90"


CHOICES = [(part, name) for part, names in PARTS.items() for name in names]
MANDATORY = {
    ("admission", "at-most"): ",alive=3",
    ("affinity", "map"): ",default=H20",
    ("affinity", "prefill-decode"): ",prefill=H800,decode=H20",
}
TYPES: dict[str, type] = {
    "cache-aware": CacheAware,
    "longest-first": LongestFirst,
    "least-attained": LeastAttained,
    "group-first": GroupFirst,
    "hysteresis": Hysteresis,
    "priced": Priced,
    "rank-rule": RankRule,
    "at-most": AtMost,
    "kv-fit": KvFit,
    "kv-forecast": KvForecast,
}


@pytest.mark.parametrize(("part", "name"), CHOICES)
def test_every_part_of_heddle_can_be_replaced_or_switched_off_alone(part: str, name: str) -> None:
    overrides = [f"{part}={name}{MANDATORY.get((part, name), '')}"]
    if name == "rank-rule":
        overrides.append("placement=presorted")
    before, built = build_strategies("heddle"), build_strategies("heddle", overrides=overrides)
    chosen = getattr(built, part)
    if name == "none":
        assert chosen is None
    elif part == "predictor":
        assert chosen.name == name
    else:
        assert type(chosen) is (
            PARTS[part][name] if part in ("affinity", "stealing") else TYPES.get(name, PARTS[part][name])
        )
    untouched = {
        "placement",
        "scheduling",
        "preemption",
        "migration",
        "admission",
        "actions",
    } - {text.partition("=")[0] for text in overrides}
    assert all(type(getattr(built, other)) is type(getattr(before, other)) for other in untouched)


def test_a_predictor_is_chosen_by_name_and_options_and_not_built() -> None:
    built = build_strategies("sticky", seed=5, overrides=["predictor=oracle,error_factor=2"])
    assert built.predictor == PredictorChoice("oracle", {"error_factor": 2, "seed": 5})
    warm = build_strategies("heddle", overrides=["predictor=xgboost,warm=runs/one.zarr"]).predictor
    assert warm is not None and warm.options["warm"] == "runs/one.zarr"


def test_every_preset_names_existing_parts() -> None:
    for parts in PRESETS.values():
        assert set(parts) == set(PARTS)
        assert all(choice.partition(",")[0] in PARTS[part] for part, choice in parts.items())
    assert all(is_dataclass(kind) for kinds in PARTS.values() for kind in kinds.values())


def test_two_builds_share_no_memory() -> None:
    one, two = build_strategies("least-load"), build_strategies("least-load")
    assert one.placement is not two.placement


def test_the_seed_reaches_the_strategies_that_draw() -> None:
    built = build_strategies("least-load", seed=42)
    assert isinstance(built.placement, LeastLoad)
    assert built.placement.seed == 42
    own = build_strategies("sticky", seed=42, overrides=["placement=least-load,seed=5"])
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
        ("fastest", "", "unknown strategy 'fastest'; choose one of: least-load, sticky, "),
        ("sticky", "plaicement=x", "unknown part 'plaicement'; choose one of: placement, scheduling, "),
        ("sticky", "placement=x", "unknown placement 'x'; choose one of: round-robin, "),
        ("sticky", "placement", "unknown placement ''; choose one of: round-robin, "),
        (
            "sticky",
            "admission=at-most",
            "admission 'at-most': it needs one of the options alive and per_engine, as in admission=at-most,",
        ),
        ("sticky", "admission=at-most,alive=3,per_engine=3", "needs one of the options alive and per_engine"),
        ("sticky", "admission=at-most,per_engine=0", "per_engine is 0; it must be a whole number from 1"),
        ("sticky", "placement=least-load,of=kv", "placement 'least-load': of=kv: use tokens or steps"),
        ("sticky", "admission=at-most,alive", "'alive' is not of the form option=value"),
        (
            "sticky",
            "admission=at-most,alife=3",
            "'at-most' has no option 'alife'; its options: alive, per_engine",
        ),
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
        ("heddle", "migration=rank-rule", "migration 'rank-rule': it needs placement=presorted"),
        ("heddle-paper", "placement=sticky", "migration 'rank-rule': it needs placement=presorted"),
        (
            "heddle",
            "migration=priced,quantile=mean",
            "migration 'priced': quantile is 'mean'; use median or q90",
        ),
        ("heddle", "migration=priced,profile=b300", "cost profile 'b300' is unknown: use "),
        (
            "heddle",
            "migration=priced,relative=-1",
            "migration 'priced': use numbers of at least 0 for relative",
        ),
        ("heddle", "migration=priced,token_s=free", "migration 'priced': "),
        ("heddle", "migration=priced,_costs=1", "migration 'priced' has no option '_costs'"),
        ("heddle-paper", "migration=rank-rule,quantile=p50", "quantile is 'p50'; use median or q90"),
        ("heddle-paper", "migration=rank-rule,plan=1", "migration 'rank-rule' has no option 'plan'"),
        (
            "heddle",
            "migration=none,quantile=q90",
            "migration 'none' has no option 'quantile'; its options: none",
        ),
        ("heddle", "placement=presorted,quantile=mean", "quantile is 'mean'; use median or q90"),
        ("heddle", "scheduling=longest-first,of=half", "of=half, quantile=q90: use remaining or total"),
        (
            "heddle",
            "scheduling=least-attained,quantum_tokens=0",
            "quantum_tokens=0: use a number of at least 1",
        ),
        ("heddle", "preemption=hysteresis,ratio=0.5", "ratio=0.5, margin_tokens=256.0: use at least 1"),
        (
            "heddle",
            "preemption=hysteresis,margin=1",
            "'hysteresis' has no option 'margin'; its options: ratio, ",
        ),
        ("heddle", "admission=additive-increase,low=0.95", "use 0 < low <= target <= high"),
        (
            "heddle",
            "admission=additive-increase,_limit=9",
            "admission 'additive-increase' has no option '_limit'",
        ),
        ("heddle", "placement=cache-aware,skew_ratio=0", "skew_ratio=0: use >= 0 and >= 1"),
        (
            "heddle",
            "predictor=crystal-ball",
            "unknown predictor 'crystal-ball'; choose one of: none, xgboost, ",
        ),
        ("heddle", "predictor=oracle,error_factor=0.5", "error_factor=0.5: use a number of at least 1"),
        ("heddle", "predictor=oracle,seed=x", "predictor 'oracle': seed is 'x'; it must be a whole number"),
        (
            "heddle",
            "predictor=oracle,mean=3",
            "predictor 'oracle' has no option 'mean'; its options: error_factor",
        ),
    ],
)
def test_bad_input_gets_one_line_that_says_what_is_allowed(preset: str, override: str, message: str) -> None:
    with pytest.raises(BadInput) as raised:
        build_strategies(preset, overrides=[override] if override else [])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_an_oracle_that_does_not_err_knows_the_lengths() -> None:
    assert Strategy("heddle", ["predictor=oracle"]).knows_lengths
    assert not Strategy("heddle").knows_lengths
    assert not Strategy("heddle", ["predictor=oracle,error_factor=2"]).knows_lengths
    assert not Strategy("slime").knows_lengths


def parts_of(built: StrategySet) -> list[object]:
    return [getattr(built, each.name) for each in fields(built)]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_strategy_builds_its_preset_with_its_overrides(preset: str) -> None:
    overrides = ["admission=at-most,alive=64", "predictor=none"]
    strategy = Strategy(preset, overrides)
    assert strategy == Strategy(preset, tuple(overrides))
    built, same = strategy.build(seed=3), build_strategies(preset, seed=3, overrides=overrides)
    assert [type(part) for part in parts_of(built)] == [type(part) for part in parts_of(same)]
    assert (built.admission, built.scheduling, built.predictor) == (AtMost(64), same.scheduling, None)
    assert Strategy.of(preset) == Strategy(preset) == Strategy.of(Strategy(preset))


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("slimy", (), "unknown strategy 'slimy'"),
        (5, (), "strategy is 5: use the name of a preset"),
        ("heddle", "scheduling=fcfs", "overrides are 'scheduling=fcfs': use a list"),
        ("heddle", 5, "overrides are 5: use a list"),
        ("heddle", [None], r"overrides are \[None\]: use a list"),
        ("heddle", ["order=fcfs"], "strategy override 'order=fcfs': unknown part 'order'"),
        ("heddle", ["scheduling=best"], "unknown scheduling 'best'"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_in_one_line(preset: Any, overrides: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message) as raised:
        Strategy(preset, overrides)
    assert "\n" not in str(raised.value)
