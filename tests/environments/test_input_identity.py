"""Inputs by their content: payloads of tasks, and functions of users."""

from __future__ import annotations

import functools
import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heddle_dask.apis.rewarded import HttpReward, ServiceReward, rewarded
from heddle_dask.environments.base import Task
from heddle_dask.environments.functions import FunctionEnvironment
from heddle_dask.environments.input_identity import code_digest, payloads_digest, prompts_digest
from heddle_dask.environments.mix import MixedEnvironment
from heddle_dask.environments.rewards import reward_identity

NUMBERS = itertools.count()
SOURCE = """
LIMIT = 3
def helper(text):
    return len(text) > LIMIT
def reward(task, transcript):
    return float(helper(transcript.text))
def other():
    return 1
"""


@pytest.fixture
def digest_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The digest of `reward` in a module of this text."""
    monkeypatch.syspath_prepend(tmp_path)

    def digest(source: str) -> str:
        name = f"rewards_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return code_digest(importlib.import_module(name).reward)

    return digest


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("def reward", "# a comment\n\n\ndef reward", True),
        ("return 1", "return 2", True),  # of a function that it does not use
        ("float(helper", "-float(helper", False),
        ("> LIMIT", ">= LIMIT", False),  # of a function that it uses
        ("LIMIT = 3", "LIMIT = 4", False),
    ],
)
def test_what_a_reward_does_is_compared(digest_of: Any, old: str, new: str, same: bool) -> None:
    assert (digest_of(SOURCE) == digest_of(SOURCE.replace(old, new))) is same


def test_closures_and_arguments_of_partial_functions_count() -> None:
    def scaled(factor: float) -> Any:
        return lambda task, transcript: factor

    assert code_digest(scaled(1.0)) == code_digest(scaled(1.0)) != code_digest(scaled(2.0))
    partial = functools.partial
    assert code_digest(partial(max, 1)) == code_digest(partial(max, 1)) != code_digest(partial(max, 2))


def test_payloads_are_compared_in_any_form() -> None:
    def of(**payload: Any) -> str:
        return payloads_digest([Task("a", "b", payload)])

    assert of(tests=["t1"], limits={"s": 9, "n": 1}) == of(limits={"n": 1, "s": 9}, tests=("t1",))
    assert of(tests=["t1"]) != of(tests=["t2"])
    assert of(x=np.arange(3)) == of(x=[0, 1, 2]) != of(x=np.arange(4))
    assert of(x={"b", "a"}) == of(x={"a", "b"})
    assert of(x=object()) == of(x=object())
    assert of(x={1: 2, "1": 3}) != of(x={1: 3, "1": 2})
    assert (
        prompts_digest([Task("a", "b", {"x": 1})])
        == prompts_digest([Task("a", "b")])
        != prompts_digest([Task("a", "c")])
    )


def test_rewards_of_environments_and_of_parts_of_a_mix() -> None:
    async def solve(task: Any, ctx: Any) -> None: ...

    def first(task: Any, transcript: Any) -> float:
        return 1.0

    plain = FunctionEnvironment(solve, name="plain")
    assert reward_identity(plain) == {}
    judged = rewarded(FunctionEnvironment(solve, name="judged"), HttpReward("https://x.example/judge?key=secret"))
    assert reward_identity(judged) == {"reward": "https://x.example/judge"}
    assert reward_identity(rewarded(plain, ServiceReward("rm"))) == {"reward": "service rm"}
    assert reward_identity(MixedEnvironment([(plain, 1), (rewarded(judged, first), 1)])) == {
        "judged: reward": code_digest(first)
    }
