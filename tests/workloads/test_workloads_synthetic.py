"""Synthetic workloads: the paper's numbers hold, the assumed ones come out as documented, a seed decides all."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle_dask.core.errors import BadInput
from heddle_dask.workloads.choice import statistics
from heddle_dask.workloads.planned import PlannedStep, PlannedTrajectory, fit_into_context
from heddle_dask.workloads.synthetic import WORKLOADS, synthesize

NAMES = list(WORKLOADS)
DIGEST = """
import hashlib
from heddle_dask.workloads.synthetic import WORKLOADS, synthesize
print(hashlib.sha256(repr([synthesize(name, prompts=5, seed=3) for name in WORKLOADS]).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def large() -> dict[str, list[PlannedTrajectory]]:
    """The paper's batch of every workload: 400 prompts of 16 samples."""
    return {name: synthesize(name, prompts=400, seed=0) for name in NAMES}


def test_the_same_under_every_hash_seed() -> None:
    digests = []
    for hash_seed in ("0", "4294967295"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, timeout=120, check=True
        )
        digests.append(done.stdout)
    assert digests[0] == digests[1]


def test_seeds_and_workloads_differ_and_more_prompts_change_nothing() -> None:
    few = synthesize("coding", prompts=3, seed=1)
    assert synthesize("coding", prompts=9, seed=1)[: len(few)] == few
    other = synthesize("coding", prompts=3, seed=2)
    assert [one.steps for one in other] != [one.steps for one in few]
    assert [one.steps for one in synthesize("math", prompts=3, seed=1)] != [one.steps for one in few]


@pytest.mark.parametrize("name", NAMES)
def test_groups_share_a_prompt_and_ids_are_unique(name: str) -> None:
    planned = synthesize(name, prompts=7, samples=4, seed=0)
    assert len(planned) == 28 == len({one.trajectory_id for one in planned})
    for start in range(0, 28, 4):
        group = planned[start : start + 4]
        assert len({(one.group_id, one.prompt_tokens) for one in group}) == 1
        assert [one.sample_index for one in group] == [0, 1, 2, 3]
    assert len({one.group_id for one in planned}) == 7
    assert {one.domain for one in planned} == {name}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 2**40),
    cap=st.integers(1, 50_000),
    samples=st.integers(1, 5),
)
def test_every_trajectory_is_well_formed(name: str, seed: int, cap: int, samples: int) -> None:
    for one in synthesize(name, prompts=2, samples=samples, seed=seed, max_output_tokens=cap):
        assert 1 <= one.generated_tokens <= cap
        assert 1 <= len(one.steps) <= WORKLOADS[name].steps_max
        assert one.prompt_tokens >= 1
        for step in one.steps[:-1]:
            assert step.generated_tokens >= 1
            assert step.observation_tokens >= 1
            assert step.tool in WORKLOADS[name].tools
            assert step.tool_s > 0
        assert one.steps[-1] == PlannedStep(one.steps[-1].generated_tokens, 0, None, 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stated_means_and_medians_hold(name: str, seed: int) -> None:
    # About 25,000 to 60,000 tool calls: the standard error of their mean is 1.3 % at most.
    stated = WORKLOADS[name]
    found = statistics(synthesize(name, prompts=400, seed=seed))
    assert found.trajectories == 6_400
    assert found.tool_s.mean == pytest.approx(stated.tool_mean_s, rel=0.05)
    assert found.observation_tokens.mean == pytest.approx(stated.observation_mean_tokens, rel=0.05)
    assert found.prompt_tokens.mean == pytest.approx(stated.prompt_mean_tokens, rel=0.07)
    # The tail moves the median up by about 2 %; 400 prompts leave an error of about 3 %.
    assert found.output_tokens.p50 == pytest.approx(stated.output_median_tokens, rel=0.1)
    assert found.steps.p50 == pytest.approx(stated.steps_median, rel=0.13)


def test_tool_times_are_the_papers() -> None:
    """Table 1, mean of the three models."""
    table = {"coding": (0.46, 0.41, 0.45), "search": (1.42, 1.41, 1.43), "math": (0.051, 0.046, 0.054)}
    for name, seconds in table.items():
        assert WORKLOADS[name].tool_mean_s == pytest.approx(sum(seconds) / 3, abs=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_the_shape_is_the_papers(name: str, large: dict[str, list[PlannedTrajectory]]) -> None:
    found = statistics(large[name])
    assert found.output_tokens.max == 40_000
    assert found.slowest_over_median > 4
    assert found.output_tokens.p50 * 4 < 40_000
    assert found.output_tokens.mean > 1.3 * found.output_tokens.p50, "right skew of tokens"
    assert found.tool_s.mean > 1.5 * found.tool_s.p50, "right skew of tool times"
    # Log-normal: median and p90 foretell the mean.
    log_sd = math.log(found.tool_s.p90 / found.tool_s.p50) / 1.2816
    assert found.tool_s.mean == pytest.approx(found.tool_s.p50 * math.exp(log_sd**2 / 2), rel=0.1)


def test_search_is_short_has_many_steps_and_much_to_prefill(
    large: dict[str, list[PlannedTrajectory]],
) -> None:
    coding, search, maths = (statistics(large[name]) for name in ("coding", "search", "math"))
    assert 2 * search.output_tokens.mean < min(coding.output_tokens.mean, maths.output_tokens.mean)
    assert search.steps.mean > max(coding.steps.mean, maths.steps.mean)
    assert search.prefilled_per_generated > 3 > 1 > coding.prefilled_per_generated
    assert coding.prefilled_per_generated > maths.prefilled_per_generated


@pytest.mark.parametrize("name", NAMES)
def test_two_thirds_of_the_spread_are_within_groups(name: str, large: dict[str, list[PlannedTrajectory]]) -> None:
    share = statistics(large[name]).between_share
    assert share is not None
    assert 0.25 < share < 0.40
    groups: dict[str, list[int]] = {}
    for one in large[name]:
        groups.setdefault(one.group_id, []).append(one.generated_tokens)
    ratios = [max(group) / min(group) for group in groups.values()]
    assert float(np.median(ratios)) > 5, "samples of one prompt differ widely"


@pytest.mark.parametrize("name", NAMES)
def test_without_tail_and_cap_the_variances_are_the_parameters(name: str) -> None:
    parameters = replace(WORKLOADS[name], tail_share=0.0)
    planned = synthesize(parameters, prompts=1500, samples=4, seed=5, max_output_tokens=10**9)
    logs = np.log([[one.generated_tokens for one in planned[i : i + 4]] for i in range(0, len(planned), 4)])
    within = float(logs.var(axis=1, ddof=1).mean())
    between = float(logs.mean(axis=1).var(ddof=1)) - within / 4
    assert math.sqrt(within) == pytest.approx(parameters.sample_log_sd, rel=0.04)
    assert math.sqrt(between) == pytest.approx(parameters.prompt_log_sd, rel=0.08)


@pytest.mark.parametrize("name", NAMES)
def test_longer_trajectories_have_more_steps(name: str, large: dict[str, list[PlannedTrajectory]]) -> None:
    logs = np.log([[one.generated_tokens, len(one.steps)] for one in large[name]])
    assert 0.5 < float(np.corrcoef(logs.T)[0, 1]) < 0.95


def test_bad_input_is_one_line() -> None:
    for arguments, words in (
        ({"workload": "poetry"}, "'poetry' is not known; choose one of coding, search, math"),
        ({"prompts": 0}, "prompts is 0, give 1 or more"),
        ({"samples": -1}, "samples is -1"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"seed": -1}, "seed is -1, give 0 or more"),
    ):
        with pytest.raises(BadInput, match=re.escape(words)) as error:
            synthesize(**{"workload": "coding", "prompts": 1, "seed": 0, **arguments})  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [{"steps_max": 0}, {"tools": ()}, {"tail_share": 1.5}, {"tool_log_sd": -1.0}, {"tail_exponent": 0.0}],
)
def test_impossible_parameters_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(BadInput, match="parameters of workload 'math'"):
        replace(WORKLOADS["math"], **changes)  # type: ignore[arg-type]


def test_a_full_context_ends_a_trajectory() -> None:
    steps = (
        PlannedStep(10, 20, "run", 1.0),
        PlannedStep(30, 40, "run", 2.0),
        PlannedStep(50, 0, None, 0.0),
    )
    whole = PlannedTrajectory("t", "g", 0, "d", 100, steps)
    fit = {"token_scale": 1.0, "tool_scale": 1.0}
    assert fit_into_context(whole, max_context_tokens=250, **fit) == whole
    # One token short: the last step is.
    assert fit_into_context(whole, max_context_tokens=249, **fit).steps[-1].generated_tokens == 49
    # The second observation fills the context: it is cut, and one token follows it.
    assert fit_into_context(whole, max_context_tokens=200, **fit).steps == (
        steps[0],
        PlannedStep(30, 39, "run", 2.0),
        PlannedStep(1, 0, None, 0.0),
    )
    assert fit_into_context(whole, max_context_tokens=150, **fit).steps[1] == PlannedStep(20, 0, None, 0.0)
    half = fit_into_context(whole, token_scale=0.5, tool_scale=3.0, max_context_tokens=250)
    assert (half.prompt_tokens, half.generated_tokens, half.context_tokens) == (50, 45, 125)
    assert half.tools_s == 9.0
    with pytest.raises(BadInput, match="a prompt of 100 tokens fills a context of 100"):
        fit_into_context(whole, max_context_tokens=100, **fit)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1000), context=st.integers(4000, 40_000), scale=st.sampled_from([0.1, 0.5, 1.0]))
def test_a_fitted_trajectory_is_a_full_context_or_whole(seed: int, context: int, scale: float) -> None:
    for one in synthesize("search", prompts=1, samples=3, seed=seed):
        fitted = fit_into_context(one, token_scale=scale, tool_scale=1.0, max_context_tokens=context)
        assert fitted.context_tokens <= context
        assert fitted.steps[-1].tool is None
        unlimited = fit_into_context(one, token_scale=scale, tool_scale=1.0, max_context_tokens=10**9)
        if unlimited.context_tokens <= context:
            assert fitted == unlimited
        else:
            assert fitted.generated_tokens < unlimited.generated_tokens
            same = max(0, len(fitted.steps) - 2)
            assert fitted.steps[:same] == unlimited.steps[:same]


def test_every_parameter_has_a_source_and_the_docs_show_its_values() -> None:
    fields = [field.name for field in dataclasses.fields(WORKLOADS["coding"])]
    docs = (Path(__file__).parents[2] / "benchmarks" / "synthetic_workloads.md").read_text()
    rows = {row[0].strip("` "): [cell.strip() for cell in row[1:]] for row in _rows(docs)}
    for field in fields[1:-1]:
        values = [getattr(parameters, field) for parameters in WORKLOADS.values()]
        assert [float(cell.replace(",", "")) for cell in rows[field][:3]] == values, field
        assert rows[field][3].startswith(("paper", "assumption:")), field


def test_the_docs_show_the_measured_statistics(large: dict[str, list[PlannedTrajectory]]) -> None:
    docs = (Path(__file__).parents[2] / "benchmarks" / "synthetic_workloads.md").read_text()
    for name in NAMES:
        found = statistics(large[name])
        rows = {row[1].strip(): row[2:] for row in _rows(docs) if row[0].strip() == name}
        for part in (
            "prompt_tokens",
            "output_tokens",
            "context_tokens",
            "steps",
            "tool_s",
            "observation_tokens",
        ):
            shown = [float(cell.replace(",", "")) for cell in rows[part]]
            # Another numpy may draw others; the largest of all is the least stable.
            assert shown[:4] == pytest.approx(list(dataclasses.astuple(getattr(found, part)))[:4], rel=0.1), part


def _rows(markdown: str) -> list[list[str]]:
    return [line.strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
