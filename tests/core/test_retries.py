"""The retry policy: its written forms, and what it refuses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.core.run_description import RetryPolicy


def test_a_mapping_and_the_written_form_give_the_same_policy() -> None:
    policy = RetryPolicy(max_losses=0, max_preemptions=7)
    assert RetryPolicy.from_mapping(asdict(policy)) == policy
    assert RetryPolicy.parse(["max_losses=0", "max-preemptions=7,max_step_attempts=32"]) == policy
    assert RetryPolicy.parse([]) == RetryPolicy.from_mapping({}) == RetryPolicy()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_loss": 1}, "unknown 'max_loss': use max_losses, max_preemptions"),
        ({"max_losses": -1}, "max_losses is -1: use a whole number of at least 0"),
        ({"max_step_attempts": 0}, "max_step_attempts is 0: use a whole number of at least 1"),
        ({"max_preemptions": 1.5}, "max_preemptions is 1.5"),
        ({"max_losses": True}, "max_losses is True"),
    ],
)
def test_what_is_no_policy_is_bad_input(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        RetryPolicy.from_mapping(values)


@pytest.mark.parametrize("text", ["max_losses", "max_losses=", "max_losses=-1", "max_losses=x", ""])
def test_what_is_no_written_policy_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match=r"use KEY=NUMBER, such as max_losses=3"):
        RetryPolicy.parse([text])
