"""Needs of calls: what they turn into, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.core.needs import Needs
from heddle_dask.core.nouns import DurationProfile
from heddle_dask.core.resources import CPUS, GPUS, MEMORY, Amounts, ResourceDemand, Resources, api_resource


def test_a_call_needs_one_cpu_unless_it_says_more() -> None:
    assert Needs().demand() == ResourceDemand.of(cpus=1)
    assert Needs(cpus=0).demand() == ResourceDemand()
    assert Needs(gpus=2).demand() == ResourceDemand.of(gpus=2)
    assert Needs(api={"search": 1}).demand() == ResourceDemand.of({api_resource("search"): 1})
    metered = Needs(api={"search": 1}, tokens=500, cost=0.0000012).demand()
    assert dict(metered.least) == {"api:search": 1, "api:search#tokens": 500, "api:search#cost": 2}


def test_needs_name_fixed_amounts_ranges_and_sets() -> None:
    demand = Needs(cpus=2, gpus={4, 1, 2}, memory="1.5 GiB").demand()
    assert demand[CPUS] == Amounts(2, 2)
    assert demand[GPUS] == Amounts(1, 4, (1, 2, 4))
    assert demand[MEMORY].least == 1_610_612_736
    assert demand.elastic == GPUS
    assert demand.with_units(2) == Resources.of(cpus=2, gpus=2, memory_bytes=1_610_612_736)
    assert demand.least[GPUS] == 1


def test_the_pool_follows_from_the_needs() -> None:
    assert [Needs().of_pool, Needs(service="judge").of_pool, Needs(gpus=1, pool="a").of_pool] == [
        "cpu",
        "gpu",
        "a",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cpus": -1}, "cpus is -1"),
        ({"cpus": (2, 1)}, "cpus is"),
        ({"cpus": set()}, "cpus is"),
        ({"cpus": {1, "2"}}, "cpus is"),
        ({"cpus": 2**63}, "cpus is"),
        ({"gpus": 1.5}, "gpus is 1.5"),
        ({"memory": "2 GB of"}, "memory is '2 GB of'"),
        ({"memory": "much"}, "memory is 'much'"),
        ({"memory": "9" * 400 + " TiB"}, "memory is"),
        ({"api": {"": 1}}, "api is"),
        ({"api": {"search": -1}}, "api search is -1"),
        ({"api": {"search#tokens": 1}}, "api 'search#tokens': a name has no '#'"),
        ({"api": {"search": 1}, "tokens": -1}, "tokens is -1"),
        ({"api": {"search": 1}, "cost": float("nan")}, "cost is nan"),
        ({"tokens": 5}, "tokens and cost are those of one API"),
        ({"api": {"search": 1, "pages": 1}, "cost": 0.5}, "tokens and cost are those of one API"),
        ({"cpus": (1, 2), "gpus": {1, 2}}, "cpus and gpus are elastic"),
        ({"pool": 5}, "pool is 5"),
        ({"profile": 3.0}, "profile is 3.0"),
        ({"profile": DurationProfile(0.0)}, "profile is"),
        ({"profile": DurationProfile(1.0, 1.5)}, "profile is"),
    ],
)
def test_what_no_call_can_need_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=f"needs: {message}"):
        Needs(**given)


@given(st.sets(st.integers(0, 64), min_size=1), st.integers(0, 80))
def test_amounts_up_to_a_limit_are_those_that_are_allowed(only: set[int], limit: int) -> None:
    amounts = Needs(cpus=only).demand()[CPUS]
    chosen = amounts.up_to(limit)
    assert list(chosen) == [units for units in range(limit + 1) if units in amounts] or amounts.most == 0
    assert all(units in only for units in chosen)


@given(st.integers(0, 8), st.integers(0, 8), st.integers(0, 8))
def test_a_demand_allows_what_it_names_and_nothing_else(least: int, more: int, granted: int) -> None:
    demand = Needs(cpus=(least, least + more)).demand()
    assert demand.allows(Resources.of(cpus=granted)) == (least <= granted <= least + more)
    assert not demand.allows(Resources.of(cpus=least, gpus=1))
