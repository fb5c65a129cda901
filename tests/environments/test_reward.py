"""What a program may return as its reward, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.environments.base import Reward, Task


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.5), np.int64(3), Fraction(1, 2)])
def test_any_number_is_a_reward(value: Any) -> None:
    made = Reward.of(value)
    assert made == Reward(float(value))
    assert (made.parts, made.metadata, made.unknown) == ({}, {}, "")
    assert Reward.of(None) == Reward(None)


@pytest.mark.parametrize("value", [math.nan, -math.inf, np.float32("inf"), 10**400])
def test_a_number_that_is_not_finite_is_unknown_and_says_so(value: Any) -> None:
    made = replace(Reward(value, parts={"a": 1}), metadata={"loss": math.nan})
    assert (made.value, made.parts, made.metadata) == (None, {"a": 1.0}, {"loss": None})
    assert made.unknown.startswith("the reward is ")
    part = Reward(0.5, parts={"a": 1, "b": value})
    assert (part.value, part.parts) == (0.5, {"a": 1.0})
    assert part.unknown.startswith("its part 'b' is ")


def test_a_task_whose_length_is_not_finite_has_an_unknown_one() -> None:
    task = Task("a", "b", known_tokens=math.inf, known_tools_s=math.nan)  # type: ignore[arg-type]
    assert (task.known_tokens, task.known_tools_s) == (0, 0)


@pytest.mark.parametrize("value", ["1.0", [1.0], {"value": 1.0}, object(), 1j])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match=r"the reward is .*: use a number, None, or Reward"):
        Reward.of(value)


def test_parts_and_metadata_are_kept_as_they_are_stored() -> None:
    made = Reward(1, parts={"format": np.float32(0.5)}, metadata={"seen": (1, 2), "why": None})
    assert (made.value, made.parts, made.metadata) == (1.0, {"format": 0.5}, {"seen": [1, 2], "why": None})
    assert Reward.of(made) is made


def test_rewards_of_turns_sum_up_to_the_value_and_are_stored() -> None:
    made = Reward(None, turns=[0.1, 0.2, 1], metadata={"why": "x"})
    assert made.value == pytest.approx(1.3)
    assert made.metadata == {"why": "x", "turn_rewards": [0.1, 0.2, 1.0]}
    assert replace(made, metadata={}).metadata == {"turn_rewards": [0.1, 0.2, 1.0]}
    assert Reward(1.0, turns=(0.5, 0.5)).value == 1.0
    with pytest.raises(BadInput, match="its turns sum up to 1, and its value is 2"):
        Reward(2.0, turns=(0.5, 0.5))
    unknown = Reward(None, turns=(0.5, math.nan))
    assert unknown.value is None and unknown.unknown == "the reward is nan"


@pytest.mark.parametrize("parts", [[1.0], {"a": None}, {"a": "1"}, {1: 1.0}, 5])
def test_bad_parts_are_refused(parts: Any) -> None:
    with pytest.raises(BadInput, match="reward"):
        Reward(1.0, parts=parts)


@pytest.mark.parametrize("metadata", [[1], {"a": object()}, {1: 2}, {"a": {1, 2}}, 5])
def test_metadata_that_cannot_be_stored_are_refused(metadata: Any) -> None:
    with pytest.raises(BadInput, match="metadata"):
        Reward(1.0, metadata=metadata)
