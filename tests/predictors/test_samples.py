"""Training rows: facts that rows of one prompt share are those that each row has alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.predictor_builders import trajectory

from heddle_dask.predictors.core_model import _others_mean
from heddle_dask.predictors.features import NO_SIBLINGS, Finished
from heddle_dask.predictors.length_distributions import Location
from heddle_dask.predictors.prompt_history import (
    ATTEMPTS_KEPT,
    Expectation,
    Moment,
    Variances,
    ended_facts,
    prompt_of,
)
from heddle_dask.predictors.samples import facts_then, make_samples


@st.composite
def attempts(draw: st.DrawFn) -> Finished:
    """An attempt at one of two prompts, by one of three versions in one of two runs, with or without a clock."""
    start_s = draw(st.sampled_from([math.nan, 0.0, 1.0, 2.5, 7.0]))
    one = trajectory(
        "t",
        draw(st.sampled_from(["g0", "g1"])),
        steps=draw(st.integers(1, 5)),
        tokens=draw(st.integers(1, 999)),
        prompt=draw(st.sampled_from([30, 300])),
        policy=draw(st.integers(0, 2)),
        censored=draw(st.booleans()),
        start_s=start_s,
    )
    ended_at_s = draw(st.sampled_from([one.ended_at_s, one.ended_at_s, math.inf]))
    ended_at_s = math.nan if math.isnan(start_s) else ended_at_s
    prompt_key = draw(st.sampled_from(["p", "q"]))
    points = tuple(replace(point, prompt_key=prompt_key) for point in one.points)
    return replace(one, prompt_key=prompt_key, run=draw(st.integers(0, 1)), points=points, ended_at_s=ended_at_s)


several = st.lists(attempts(), min_size=1, max_size=ATTEMPTS_KEPT + 9).map(
    lambda drawn: [
        replace(one, trajectory_id=f"t{n}", points=tuple(replace(p, trajectory_id=f"t{n}") for p in one.points))
        for n, one in enumerate(drawn)
    ]
)


@given(finished=several, drift=st.sampled_from([0.0, 0.3]))
@settings(max_examples=150, deadline=None)
def test_shared_facts_are_those_of_each_row_alone(finished: list[Finished], drift: float) -> None:
    location = Location.fit(finished, np.log1p([one.generated_tokens for one in finished]))
    expected = Expectation(location.of, lambda one: 0.3 * one.max_steps, drift)
    members: dict[str, list[Finished]] = {}
    for one in finished:
        members.setdefault(prompt_of(one), []).append(one)
    samples = make_samples(finished, max_rows=60, folds=2, seed=1)
    alone = [
        NO_SIBLINGS if known is None else facts_then(row, members[prompt_of(owner)], expected, owner.run)
        for row, owner, known in zip(samples.rows, samples.owners, samples.known, strict=True)
    ]
    assert repr(samples.facts(expected)) == repr(alone)
    picked = samples.fold == 0
    assert repr(samples.take(picked).facts(expected)) == repr(
        [facts for facts, use in zip(alone, picked.tolist(), strict=True) if use]
    )


@given(finished=several, drift=st.sampled_from([0.0, 0.3]))
@settings(max_examples=100, deadline=None)
def test_mean_of_the_others_is_that_of_their_facts(finished: list[Finished], drift: float) -> None:
    location = Location.fit(finished, np.log1p([one.generated_tokens for one in finished]))
    expected = Expectation(location.of, lambda one: 0.0, drift)
    means, counts = _others_mean(finished, location, Variances(drift=drift))
    for one, mean, count in zip(finished, means.tolist(), counts.tolist(), strict=True):
        prompt = [each for each in finished if prompt_of(each) == prompt_of(one)][-ATTEMPTS_KEPT - 1 :]
        others = [each for each in prompt if each is not one]
        facts = ended_facts(others, Moment(one.policy_version, one.lineage, one.run), expected)
        assert (count, mean) == (facts.finished, facts.mean_excess if facts.finished else 0.0)
