"""The learned predictor: fallbacks, order of quantiles, learning, censoring, determinism, saving."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds.predictor_builders import SMALL, by_formula, trajectory

from heddle_dask.core.errors import BadInput
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.features import Finished, Progress
from heddle_dask.predictors.known import KnownWork, NoisyOracle, Oracle
from heddle_dask.predictors.learned import LearnedPredictor, LearningSettings
from heddle_dask.predictors.length_distributions import ResidualDistribution
from heddle_dask.predictors.model import (
    HISTORY_FROM,
    MIN_BUCKET_ROWS,
    PROMPT_FROM,
    TREES_FROM,
    _calibrate,
    _HeldOutRows,
)
from heddle_dask.predictors.stored import load_predictor, save_predictor


@pytest.fixture(scope="module")
def trained() -> LearnedPredictor:
    predictor = LearnedPredictor(SMALL)
    predictor.warm_start(by_formula(160))
    return predictor


def _sources(count: int) -> tuple[str, str]:
    """Who answers for a stranger, and for a sibling of a finished trajectory."""
    predictor: Predictor = LearnedPredictor(SMALL)
    predictor.warm_start(by_formula(count, groups=3))
    stranger = trajectory("new", "nobody").points[0]
    sibling = trajectory("new", "t-g0").points[0]
    first, second = predictor.predict([stranger, sibling])
    return first.source, second.source


def test_fallback_order_follows_the_amount_of_data() -> None:
    assert _sources(HISTORY_FROM - 1) == ("constant", "constant")
    assert _sources(PROMPT_FROM - 1) == ("constant", "group history")
    assert _sources(TREES_FROM - 1) == ("prompt only", "group history")
    assert _sources(TREES_FROM) == ("xgboost", "xgboost")


def test_nothing_known_is_still_an_answer() -> None:
    predictor = LearnedPredictor(SMALL)
    (prediction,) = predictor.predict([trajectory("a").points[0]])
    assert prediction.source == "constant" and prediction.tokens_q90 >= prediction.tokens > 0
    assert predictor.predict([]) == []
    assert not predictor.due()


def test_group_history_follows_its_group() -> None:
    predictor = LearnedPredictor(SMALL)
    short = [trajectory(f"s{i}", f"short{i % 4}", steps=2) for i in range(16)]
    long = [trajectory(f"l{i}", f"long{i % 4}", steps=30) for i in range(16)]
    predictor.warm_start([*short, *long])
    low, high = predictor.predict([trajectory("n", "short1").points[0], trajectory("m", "long1").points[0]])
    assert low.source == high.source == "group history"
    assert high.tokens > 3 * low.tokens


def test_history_is_corrected_for_the_policy() -> None:
    """One sibling by a wordy policy says little about a terse one: its excess counts, not its length."""
    predictor = LearnedPredictor(SMALL)
    terse = [trajectory(f"a{i}", f"a{i}", steps=4, policy=1) for i in range(20)]
    wordy = [trajectory(f"b{i}", f"b{i}", steps=40, policy=2) for i in range(20)]
    predictor.warm_start([*terse, *wordy, trajectory("w", "shared", steps=40, policy=2)])
    row = replace(trajectory("x", "shared", policy=1).points[0])
    assert predictor.predict([row])[0].tokens < 1000


rows = st.builds(
    Progress,
    trajectory_id=st.just("x"),
    group_id=st.sampled_from(["t-g0", "t-g1", "nobody"]),
    domain=st.sampled_from(["law", "other"]),
    policy_version=st.integers(0, 5),
    prompt_tokens=st.integers(0, 10**6),
    message_tokens=st.integers(0, 10**5),
    context_tokens=st.integers(0, 10**6),
    generated_tokens=st.integers(0, 10**6),
    steps_finished=st.integers(0, 300),
    max_steps=st.integers(0, 300),
    step_tokens=st.lists(st.integers(0, 10**5), max_size=4).map(tuple),
    observed_tokens=st.lists(st.integers(0, 10**5), max_size=4).map(tuple),
    tool_labels=st.lists(st.sampled_from(["short", "long", "never seen"]), max_size=4).map(tuple),
    tool_times_s=st.lists(st.one_of(st.just(math.nan), st.floats(0, 1e5)), max_size=4).map(tuple),
    tools_s=st.floats(0, 1e6),
    tool_errors=st.integers(0, 50),
    last_tool_failed=st.booleans(),
    elapsed_s=st.one_of(st.just(math.nan), st.floats(0, 1e6)),
)


@given(batch=st.lists(rows, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_quantiles_are_ordered_and_finite(trained: LearnedPredictor, batch: list[Progress]) -> None:
    for prediction in trained.predict(batch):
        assert 1.0 <= prediction.tokens <= prediction.tokens_q90 < math.inf


def test_batch_does_not_change_a_row(trained: LearnedPredictor) -> None:
    batch = [one.points[1] for one in by_formula(20, seed=5, prefix="new")]
    together = trained.predict(batch)
    assert [trained.predict([row])[0] for row in batch] == together


def _error(predictor: LearnedPredictor, tested: list[Finished]) -> float:
    points = [one.points[1] for one in tested]
    predicted = predictor.predict(points)
    return float(
        np.mean(
            [
                abs(math.log(said.tokens / (one.generated_tokens - point.generated_tokens)))
                for said, one, point in zip(predicted, tested, points, strict=True)
            ]
        )
    )


def test_online_learning_improves_on_a_law() -> None:
    predictor = LearnedPredictor(SMALL, LearningSettings(growth=0.5))
    tested = by_formula(60, seed=9, prefix="test")
    errors, fits = [], 0
    for index, one in enumerate(by_formula(150)):
        for point in one.points:
            predictor.observe_running(point)
        predictor.observe_finished(replace(one, points=()))
        fits += predictor.due() and predictor._fit_and_adopt()
        if index in (9, 149):
            errors.append(_error(predictor, tested))
    assert errors[1] < 0.5 * errors[0]
    assert 5 <= fits <= 15
    assert predictor.predict([tested[0].points[1]])[0].source == "xgboost"


def test_coverage_on_new_groups(trained: LearnedPredictor) -> None:
    tested = by_formula(300, seed=3, prefix="new")
    points = [one.points[1] for one in tested]
    predicted = trained.predict(points)
    covered = [
        one.generated_tokens - point.generated_tokens <= said.tokens_q90
        for said, one, point in zip(predicted, tested, points, strict=True)
    ]
    assert 0.8 <= float(np.mean(covered)) <= 1.0


def test_running_trajectories_are_learnt_from() -> None:
    """When the short ones have finished first, those that still run say that there are long ones."""
    short = [trajectory(f"s{i}", f"s{i}", steps=2) for i in range(30)]
    row = trajectory("new", "new").points[0]
    blind = LearnedPredictor(SMALL)
    blind.warm_start(short)
    told = LearnedPredictor(SMALL)
    for index in range(30):
        for point in trajectory(f"r{index}", f"r{index}", steps=40).points:
            told.observe_running(point)
    told.warm_start(short)
    assert told.predict([row])[0].tokens_q90 > 2 * blind.predict([row])[0].tokens_q90


def test_kaplan_meier_counts_the_cut_off() -> None:
    residuals = np.log1p(np.arange(1.0, 101.0))
    whole = ResidualDistribution.fit(residuals, np.zeros(100, dtype=bool))
    cut = ResidualDistribution.fit(residuals, np.arange(100) % 2 == 0)
    middle = np.array([0.5])
    assert cut.quantile(middle)[0] > whole.quantile(middle)[0]
    assert math.expm1(whole.quantile(middle)[0]) == pytest.approx(50, abs=1)


def test_what_tools_add_is_known_from_those_that_are_kept() -> None:
    predictor = LearnedPredictor(SMALL, LearningSettings(kept=20))
    told = [replace(one, observed_tokens=3 * one.generated_tokens) for one in by_formula(30)]
    predictor.warm_start(replace(one, observed_tokens=99 * one.generated_tokens) for one in told[:10])
    predictor.warm_start([*told[10:], told[-1]])  # one of them twice
    (answer,) = predictor.predict([trajectory("new", "nobody").points[0]])
    assert answer.observation_per_token == pytest.approx(3.0)
    (unknown,) = LearnedPredictor(SMALL).predict([trajectory("new", "nobody").points[0]])
    assert unknown.observation_per_token is None


def test_tools_go_on_as_they_did_and_before_the_first_as_those_of_others() -> None:
    predictor = LearnedPredictor(SMALL, LearningSettings(kept=20))
    told = [replace(one, tools_s=0.5 * one.generated_tokens) for one in by_formula(30)]
    predictor.warm_start(replace(one, tools_s=99.0 * one.generated_tokens) for one in told[:10])
    predictor.warm_start([*told[10:], told[-1]])
    fresh = replace(trajectory("new", "nobody").points[0], generated_tokens=0, tools_s=0.0)
    typical = sum(one.generated_tokens for one in told[10:]) / 20
    behind = replace(fresh, generated_tokens=round(typical), tools_s=1.5 * round(typical))
    first, later = predictor.predict([fresh, behind])
    assert first.tools_s == pytest.approx(0.5 * first.tokens)
    assert later.tools_s == pytest.approx(1.0 * later.tokens, rel=0.01), "half its own"
    (unknown,) = LearnedPredictor(SMALL).predict([fresh])
    assert unknown.tools_s == 0.0


@pytest.mark.filterwarnings("error")
def test_rows_that_were_all_cut_off_calibrate_too() -> None:
    rows = 2 * MIN_BUCKET_ROWS
    values = np.linspace(1.0, 3.0, rows)
    both = (np.stack([values, values + 1.0]), np.stack([values + 0.5, values + 1.5]))
    part = _HeldOutRows(
        known=np.zeros(rows, dtype=bool),
        steps=np.zeros(rows, dtype=np.int64),
        censored=np.ones(rows, dtype=bool),
        trees=both[0],
        distributions=both[1],
        truth=values,
    )
    made = _calibrate([part])
    assert made is not None and not made.weight.any(), "nothing tells which is nearer"
    assert np.isfinite(made.shift).all()


def test_memory_is_bounded() -> None:
    predictor = LearnedPredictor(SMALL, LearningSettings(kept=50))
    for one in by_formula(200):
        predictor.observe_finished(one)
    learnt = predictor.learnt()
    assert len(learnt.finished) == 50 and learnt.told == 200


def test_saved_predictor_predicts_and_learns_the_same(trained: LearnedPredictor, tmp_path: Path) -> None:
    path = tmp_path / "predictor.json.gz"
    save_predictor(trained, path)
    loaded = load_predictor(path)
    batch = [one.points[i] for one in by_formula(30, seed=7, prefix="new") for i in (0, 1)]
    batch.append(trajectory("x", "t-g0").points[2])
    assert loaded.predict(batch) == trained.predict(batch)
    again = tmp_path / "again.json.gz"
    save_predictor(loaded, again)
    assert again.read_bytes() == path.read_bytes()
    for predictor in (loaded, load_predictor(path)):
        for one in by_formula(45, seed=11, prefix="more"):
            predictor.observe_finished(one)
        assert predictor.due()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x1f\x8b\x08", b"{}"])
def test_no_predictor_file_is_bad_input(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BadInput, match="no saved predictor"):
        load_predictor(path)
    with pytest.raises(BadInput, match="No such file"):
        load_predictor(tmp_path / "missing")


def test_predictor_of_another_version_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    with monkeypatch.context() as patched:
        patched.setattr("heddle_dask.predictors.stored.VERSION", 99)
        save_predictor(LearnedPredictor(SMALL), path)
    with pytest.raises(BadInput, match="version 99"):
        load_predictor(path)


_SCRIPT = """
from worlds.predictor_builders import SMALL, by_formula
from heddle_dask.predictors.learned import LearnedPredictor
predictor = LearnedPredictor(SMALL)
predictor.warm_start(by_formula(90))
for said in predictor.predict([one.points[1] for one in by_formula(20, seed=4, prefix="n")]):
    print(repr(said))
"""


def test_two_hash_seeds_predict_the_same() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "1")
    ]
    assert outputs[0] == outputs[1] and outputs[0].count("xgboost") == 20


def test_oracle_knows_and_noise_is_fixed() -> None:
    one = trajectory("a", steps=10)
    oracle: Predictor = Oracle(KnownWork({"a": 1000.0}, {"a": 30.0}))
    (told,) = oracle.predict([one.points[3]])
    assert (told.tokens, told.tokens_q90, told.source) == (700.0, 700.0, "oracle")
    assert one.points[3].tools_s == 3.0 and told.tools_s == 27.0
    assert not oracle.due() and oracle.fit() is None
    later: dict[str, float] = {}
    oracle = Oracle(KnownWork(later, later))
    later["a"] = 50.0  # as trajectories are submitted
    assert oracle.predict([one.points[3]])[0].tools_s == 47.0
    noisy = NoisyOracle(KnownWork({"a": 1000.0, "b": 1000.0}), error=2.0, seed=1)
    first = noisy.predict([one.points[0], replace(one.points[0], trajectory_id="b")])
    again = noisy.predict([one.points[0], replace(one.points[0], trajectory_id="b")])
    assert [told.tokens for told in first] == [told.tokens for told in again]
    assert first[0].tokens != first[1].tokens
    assert first[0].tokens_q90 >= first[0].tokens
    exact = NoisyOracle(KnownWork({"a": 1000.0}, {"a": 30.0}), error=1.0)
    assert exact.predict([one.points[3]])[0].tokens == 700.0
