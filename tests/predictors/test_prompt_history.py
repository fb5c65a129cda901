"""The history of a prompt: what fades, what is bounded, what is known when, and what it does to predictions."""

from __future__ import annotations

import gzip
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.predictor_builders import SMALL, by_formula, trajectory

from heddle_dask.predictors.features import FEATURES, NO_SIBLINGS, Finished
from heddle_dask.predictors.learned import LearnedPredictor
from heddle_dask.predictors.prompt_history import (
    ATTEMPTS_KEPT,
    DEFAULT_DRIFT,
    PROMPTS_KEPT,
    RUN_VERSIONS,
    Expectation,
    Moment,
    PastAttempt,
    PromptHistory,
    Variances,
    ended_facts,
    ratio_trust,
    variances,
    versions_apart,
)
from heddle_dask.predictors.samples import GroupBook, facts_then
from heddle_dask.predictors.stored import load_predictor, save_predictor

FADING = Expectation(lambda one: 5.0, lambda one: 0.0, drift=0.5)


def attempt(name: str, tokens: int, *, version: int = 0, run: int = 0, censored: bool = False) -> Finished:
    one = trajectory(name, f"group of {name}", policy=version, censored=censored)
    return replace(one, prompt_key="p", generated_tokens=tokens, run=run)


def test_attempts_by_the_present_policy_count_in_full_and_older_ones_less() -> None:
    now = Moment(policy_version=10)
    same = ended_facts([attempt(str(n), 100, version=10) for n in range(4)], now, FADING)
    older = ended_facts([attempt(str(n), 100, version=8) for n in range(4)], now, FADING)
    assert same.finished == 4.0
    assert older.finished == pytest.approx(1 / (1 / 4 + 0.5 * 2))
    assert math.isnan(older.same_excess) and not math.isnan(same.same_excess)
    mixed = ended_facts([attempt("new", 100, version=10), attempt("old", 10_000, version=2)], now, FADING)
    low, high = math.log1p(100) - 5.0, math.log1p(10_000) - 5.0
    assert low < mixed.mean_excess < low + (high - low) / 5


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 9), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 10**6),
)
def test_mean_is_between_its_attempts_and_one_that_was_cut_off_never_shortens_it(
    drawn: list[tuple[int, int, bool]], more: int
) -> None:
    now = Moment(policy_version=9)
    attempts = [attempt(str(n), *each[:1], version=each[1], censored=each[2]) for n, each in enumerate(drawn)]
    facts = ended_facts(attempts, now, FADING)
    values = [math.log1p(each.generated_tokens) - 5.0 for each in attempts]
    if facts.finished:
        assert min(values) - 1e-9 <= facts.mean_excess <= max(values) + 1e-9
        assert facts.finished <= len(attempts) + 1e-9
    cut = ended_facts([*attempts, attempt("cut", more, version=9, censored=True)], now, FADING)
    whole = [each for each in attempts if not each.censored]
    if whole and len(whole) == len(attempts):
        assert cut.mean_excess >= facts.mean_excess - 1e-9


def test_an_attempt_that_was_cut_off_short_says_nothing() -> None:
    short, long = attempt("a", 20, censored=True), attempt("a", 2000, censored=True)
    assert ended_facts([short], Moment(0), FADING) == NO_SIBLINGS
    assert ended_facts([long], Moment(0), FADING).finished == 1.0


def test_versions_of_other_lines_are_apart_by_the_order_of_runs() -> None:
    assert versions_apart(Moment(7, run=1), attempt("a", 1, version=4, run=1)) == 3
    assert versions_apart(Moment(7, run=3), attempt("a", 1, version=4, run=1)) == 2 * RUN_VERSIONS
    line = replace(attempt("a", 1, version=4, run=1), lineage="x")
    assert versions_apart(Moment(7, "x", run=3), line) == 3
    assert versions_apart(Moment(7, "y", run=1), line) == RUN_VERSIONS


def test_memory_is_bounded_and_the_prompts_tried_last_stay() -> None:
    history = PromptHistory()
    for number in range(ATTEMPTS_KEPT + 5):
        history.add("p", PastAttempt.of(attempt(str(number), 1 + number)))
    assert [each.generated_tokens for each in history.attempts()["p"]] == list(range(6, ATTEMPTS_KEPT + 6))
    one = PastAttempt.of(attempt("a", 5))
    for number in range(PROMPTS_KEPT):
        history.add(f"q{number}", one)
    assert len(history.attempts()) == PROMPTS_KEPT and "p" not in history.attempts()


@given(at=st.floats(0, 50), end=st.floats(0, 50), run=st.integers(0, 2), tokens=st.integers(1, 10**5))
def test_only_what_had_ended_is_known_in_any_run(at: float, end: float, run: int, tokens: int) -> None:
    row = replace(trajectory("me", start_s=0.0).points[0], at_s=at, prompt_key="p")
    other = replace(attempt("other", tokens, run=run), started_at_s=0.0, ended_at_s=end)
    facts = facts_then(row, [other], FADING, run=1)
    known = run == 0 or (run == 1 and end <= at)
    assert (facts.finished > 0) == known
    if not known:
        changed = facts_then(row, [replace(other, generated_tokens=tokens + 999)], FADING, run=1)
        assert repr(changed) == repr(facts)


def test_book_and_past_agree_over_runs() -> None:
    members = [
        replace(attempt("a", 700, version=3), started_at_s=0.0, ended_at_s=9.0),
        replace(attempt("b", 90, version=4, run=1), started_at_s=0.0, ended_at_s=1.0),
    ]
    row = replace(trajectory("me", policy=5, start_s=0.0).points[2], prompt_key="p")
    book = GroupBook()
    book.finish(members[0])
    book.run = 1
    book.finish(members[1])
    assert repr(book.facts(row, FADING)) == repr(facts_then(row, members, FADING, run=1))


def walk(drift: float, seed: int, prompts: int = 300) -> list[tuple[Finished, float]]:
    """Two attempts at each of ten versions, of prompts whose level walks at random; variance within: 0.04."""
    rng = random.Random(seed)
    made = []
    for prompt in range(prompts):
        level = rng.gauss(0.0, 0.6)
        for version in range(8):
            for number in range(2):
                one = replace(attempt(f"{version}-{number}", 9, version=version), prompt_key=f"p{prompt}")
                made.append((one, level + rng.gauss(0.0, 0.2)))
            level += rng.gauss(0.0, math.sqrt(0.04 * drift))
    return made


@pytest.mark.parametrize("drift", [0.0, 0.2, 1.0])
def test_drift_is_measured(drift: float) -> None:
    measured = variances(walk(drift, seed=1))
    # Half the squared difference of two attempts grows by half the variance of the walk.
    assert measured.drift == pytest.approx(drift / 2, rel=0.25, abs=0.01)
    assert measured.trust < 0.5, "prompts differ more than attempts at one"


def test_few_prompts_measure_nothing() -> None:
    assert variances(walk(1.0, seed=1, prompts=4)) == Variances()
    one_version = [pair for pair in walk(0.0, seed=2) if pair[0].policy_version == 0]
    assert variances(one_version).drift == pytest.approx(DEFAULT_DRIFT)


def two_kinds(epoch: int) -> list[Finished]:
    """Twenty attempts at prompts of equal length, half of which take ten times as long; a group for each epoch."""
    return [
        replace(
            trajectory(f"{epoch}/{n}", f"{epoch}/g{n % 10}", steps=20 if n % 10 < 5 else 2),
            prompt_key=f"p{n % 10}",
        )
        for n in range(20)
    ]


def asked(predictor: LearnedPredictor) -> tuple[float, float]:
    """Tokens predicted for a long and a short prompt before the first step, in a group that is new."""
    rows = [
        replace(trajectory("new", f"later/{key}").points[0], prompt_key=key, group_id=f"later/{key}")
        for key in ("p1", "p7")
    ]
    first, second = predictor.predict(rows)
    return first.tokens, second.tokens


def test_the_next_epoch_of_a_run_knows_its_prompts_at_once() -> None:
    predictor = LearnedPredictor(SMALL)
    for one in two_kinds(0):
        predictor.observe_finished(one)
    assert predictor.due() and predictor._fit_and_adopt()
    long, short = asked(predictor)
    assert long > 3 * short


def test_history_is_saved_and_goes_on_in_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "predictor"
    predictor = LearnedPredictor(SMALL)
    predictor.warm_start(two_kinds(0))
    save_predictor(predictor, path)
    loaded = load_predictor(path)
    assert asked(loaded) == asked(predictor)
    assert loaded.learnt().history == predictor.learnt().history
    for one in two_kinds(0):
        loaded.observe_finished(one)  # names of another run, which may be the same
    assert loaded.learnt().run == predictor.learnt().run + 1
    assert len(loaded.learnt().finished) == 40
    assert {len(attempts) for attempts in loaded.learnt().history.values()} == {4}


def test_a_history_outlives_the_training_data(tmp_path: Path) -> None:
    path = tmp_path / "predictor"
    predictor = LearnedPredictor(SMALL, replace(LearnedPredictor().learning, kept=25))
    predictor.warm_start(two_kinds(0))
    predictor.warm_start(by_formula(25, prefix="later"))
    save_predictor(predictor, path)
    assert "p1" in load_predictor(path).learnt().history


def test_a_file_of_version_5_is_read(tmp_path: Path) -> None:
    predictor = LearnedPredictor(SMALL)
    predictor.warm_start(by_formula(100))
    path = tmp_path / "predictor"
    save_predictor(predictor, path)
    data = json.loads(gzip.decompress(path.read_bytes()))
    data["version"] = 5
    data["finished"] = [[own[:-4], [point[:-2] for point in points]] for own, points in data["finished"]]
    for name in ("run", "history"):
        del data[name]
    del data["model"]["laws"]["drift"]
    assert tuple(data["features"]) == FEATURES
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    loaded = load_predictor(path)
    assert loaded.learnt().history.keys() == {f"t-g{n}" for n in range(25)}
    strangers = [one.points[1] for one in by_formula(20, seed=5, prefix="new")]
    assert loaded.predict(strangers) == predictor.predict(strangers)


def told_of_tools() -> LearnedPredictor:
    """Tools of p1 take a second for each token and add nine tokens; those of other prompts do nothing."""
    predictor = LearnedPredictor(SMALL)
    predictor.warm_start(
        replace(one, tools_s=float(one.generated_tokens), observed_tokens=9 * one.generated_tokens)
        if one.prompt_key == "p1"
        else one
        for one in two_kinds(0)
    )
    return predictor


def test_what_tools_take_follows_the_prompt_and_the_ratio_of_the_run_is_that_of_all() -> None:
    rows = [replace(trajectory("new", key).points[0], prompt_key=key) for key in ("p1", "p2")]
    first, second = told_of_tools().predict(rows)
    assert first.tools_s > second.tools_s
    assert first.observation_per_token == second.observation_per_token, "the controller takes the last one it hears"


def test_what_tools_add_follows_the_prompt() -> None:
    predictor = told_of_tools()
    points = trajectory("new", "g", steps=6).points
    rows = [replace(points[steps], prompt_key=key) for steps in (0, 5) for key in ("p1", "p2", "stranger")]
    told = predictor.predict(rows)
    assert predictor.model is not None
    of_all, trust = told[0].observation_per_token, predictor.model.ratio_trust
    assert of_all is not None and 0 < of_all < 9
    for wordy, quiet, stranger in (told[:3], told[3:]):
        assert stranger.observation_tokens is None
        assert wordy.observation_tokens is not None and quiet.observation_tokens is not None
        # Two attempts at each prompt, beside which the ratio of all counts as `trust` attempts.
        assert wordy.observation_tokens / wordy.tokens == pytest.approx((2 * 9 + trust * of_all) / (2 + trust))
        assert quiet.observation_tokens / quiet.tokens == pytest.approx(trust * of_all / (2 + trust))


def test_more_attempts_outweigh_the_ratio_of_all() -> None:
    predictor = told_of_tools()
    row = replace(trajectory("new").points[0], prompt_key="p2")
    ratios = []
    for number in range(8):
        predictor.observe_finished(replace(attempt(f"more {number}", 2000), prompt_key="p2", observed_tokens=9 * 2000))
        (told,) = predictor.predict([row])
        assert told.observation_tokens is not None
        ratios.append(told.observation_tokens / told.tokens)
    assert ratios == sorted(ratios) and 6.5 < ratios[-1] < 9


def observing(spread: float, noise: float, prompts: int = 60) -> list[Finished]:
    """Four attempts at each prompt; logs of their ratios differ by `spread` between prompts and `noise` within."""
    rng = random.Random(3)
    made = []
    for number in range(prompts):
        level = rng.gauss(0.5, spread)
        for name in range(4):
            observed = round(1000 * math.exp(level + rng.gauss(0.0, noise)))
            one = replace(attempt(f"{number}-{name}", 1000), prompt_key=f"p{number}", observed_tokens=observed)
            made.append(one)
    return made


def test_how_much_attempts_tell_of_observations_is_measured() -> None:
    alike = ratio_trust(observing(spread=0.0, noise=0.7))
    differing = ratio_trust(observing(spread=0.7, noise=0.05))
    between = ratio_trust(observing(spread=0.4, noise=0.6))
    assert differing <= 0.5 < between < 8.0 <= alike
    assert ratio_trust(observing(0.7, 0.05, prompts=4)) == math.inf
    assert ratio_trust([]) == math.inf


def test_trust_in_ratios_is_saved(tmp_path: Path) -> None:
    predictor = told_of_tools()
    save_predictor(predictor, tmp_path / "predictor")
    loaded = load_predictor(tmp_path / "predictor").model
    assert predictor.model is not None and loaded is not None
    assert loaded.ratio_trust == predictor.model.ratio_trust < math.inf
