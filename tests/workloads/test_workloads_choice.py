"""Choosing a workload by name or file, its errors, and its statistics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.bootstrap import bootstrap
from heddle_dask.workloads.choice import Summary, load_workload, statistics
from heddle_dask.workloads.planned import PlannedStep, PlannedTrajectory
from heddle_dask.workloads.synthetic import WORKLOADS, synthesize

GOOD: dict[str, Any] = {"trajectories": 32, "samples": 16, "seed": 0, "max_context_tokens": 131_072}


def one_line(path: Path) -> Path:
    """A trace file of one trajectory."""
    steps = [
        {"gen_tokens": 50, "obs_tokens": 7, "tool": "t", "tool_s": 0.5},
        {"gen_tokens": 3, "obs_tokens": None, "tool": None, "tool_s": None},
    ]
    line = {"id": "a", "group": "g", "prompt_tokens": 9, "complete": True, "success": None, "steps": steps}
    path.write_text(json.dumps(line) + "\n")
    return path


def trajectory(group: str, index: int, *generated: int) -> PlannedTrajectory:
    """Steps that generate those tokens; tools of 2 s that add 3 tokens lie between them."""
    steps = [PlannedStep(tokens, 3, "t", 2.0) for tokens in generated[:-1]]
    return PlannedTrajectory(
        f"{group}{index}", group, index, "d", 10, (*steps, PlannedStep(generated[-1], 0, None, 0.0))
    )


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_name_gives_the_synthetic_workload(name: str) -> None:
    loaded = load_workload(name, **{**GOOD, "max_context_tokens": 10**9})
    assert loaded == synthesize(name, prompts=2, seed=0)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_scales_and_context_hold(name: str) -> None:
    loaded = load_workload(name, **{**GOOD, "max_context_tokens": 5000}, token_scale=0.5, tool_scale=0.0)
    assert max(one.context_tokens for one in loaded) <= 5000
    assert max(one.generated_tokens for one in loaded) <= 20_000
    assert sum(one.tools_s for one in loaded) == 0.0


def test_a_path_gives_the_file_drawn_again_whatever_the_samples(tmp_path: Path) -> None:
    path = one_line(tmp_path / "mine.jsonl")
    loaded = load_workload(path, **{**GOOD, "trajectories": 33})
    assert loaded == bootstrap(path, trajectories=33, seed=0, max_context_tokens=131_072)
    assert load_workload(str(path), **{**GOOD, "trajectories": 33, "samples": 7}) == loaded
    assert loaded[0].domain == "mine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"name_or_file": "poetry"},
            "workload 'poetry': neither one of coding, search, math, claude_code_transcripts, claude_code_proxy, "
            "tau_dialogues, intercode nor a trace file",
        ),
        ({"name_or_file": "."}, "workload '.': neither one of"),
        ({"trajectories": 0}, "trajectories is 0, give 1 or more"),
        ({"trajectories": 40}, "40 trajectories are no multiple of 16 samples a prompt; give 48"),
        ({"samples": 0}, "samples is 0, give 1 or more"),
        ({"seed": -3}, "seed is -3, give 0 or more"),
        ({"max_context_tokens": 1}, "max_context_tokens is 1, give 2 or more"),
        ({"max_context_tokens": 50}, "fills a context of 50; use a smaller token_scale or a longer context"),
        ({"token_scale": 0.0}, "token_scale is 0.0, give a number greater than 0"),
        ({"token_scale": float("nan")}, "token_scale is nan"),
        ({"tool_scale": -1.0}, "tool_scale is -1.0, give a number from 0 up"),
        ({"tool_scale": float("inf")}, "tool_scale is inf"),
    ],
)
def test_bad_input_is_one_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=re.escape(words)) as error:
        load_workload(**{"name_or_file": "coding", **GOOD, **changes})
    assert "\n" not in str(error.value)


def test_an_empty_file_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    with pytest.raises(BadInput, match="no trajectory with known token counts"):
        load_workload(path, **GOOD)
    with pytest.raises(BadInput, match="without trajectories"):
        statistics([])


def test_statistics_of_a_few() -> None:
    found = statistics([trajectory("g", 0, 10, 30), trajectory("g", 1, 20), trajectory("h", 0, 5, 5, 20)])
    assert (found.trajectories, found.groups) == (3, 2)
    assert found.output_tokens == Summary(30.0, 30.0, 38.0, 39.8, 40.0)
    assert found.steps.mean == 2.0
    assert (found.tool_s.mean, found.observation_tokens.mean) == (2.0, 3.0)
    assert found.context_tokens.max == 53.0
    assert found.max_over_mean == pytest.approx(4 / 3)
    assert found.prefilled_per_generated == pytest.approx(39 / 90)
    # 40 and 30 tokens with one and two tools of 2 s, 20 without.
    assert statistics([trajectory("g", 0, 10, 30), trajectory("g", 1, 20)], token_s=1.0).slowest_over_median == (
        pytest.approx(42 / 31)
    )
    assert found.between_share is None, "only one group has two"


def test_statistics_without_tools_are_zero() -> None:
    found = statistics([trajectory("g", 0, 10)])
    assert found.tool_s == Summary(0.0, 0.0, 0.0, 0.0, 0.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 1000), min_size=3, max_size=3), min_size=2, max_size=6).filter(
        lambda groups: len({tokens for group in groups for tokens in group}) > 1
    )
)
def test_between_share_of_equal_groups_is_the_textbooks(groups: list[list[int]]) -> None:
    planned = [
        trajectory(f"g{number}-", index, tokens)
        for number, group in enumerate(groups)
        for index, tokens in enumerate(group)
    ]
    logs = np.log(groups)
    within = float(logs.var(axis=1, ddof=1).mean())
    between = max(0.0, float(logs.mean(axis=1).var(ddof=1)) - within / 3)
    assert statistics(planned).between_share == pytest.approx(between / (between + within), abs=1e-9)
