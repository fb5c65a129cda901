"""When groups go on from a prefix, and from which: against simulated tasks whose pass rate is monotone in the cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.training_builders import trained_record

from heddle_dask.core.errors import BadInput
from heddle_dask.records.trajectory import TrajectoryRecord
from heddle_dask.records.trajectory_prefix import PREFIX, TrajectoryPrefix
from heddle_dask.training.prefix_sampling import PrefixRule, PrefixSampler

RULE = PrefixRule()


def group(
    name: str,
    passed: int,
    failed: int,
    steps: int = 4,
    version: int = 0,
    prefix: TrajectoryPrefix | None = None,
    **changes: Any,
) -> list[TrajectoryRecord]:
    """A finished group of the task ``key``."""
    own = steps if prefix is None else steps - prefix.steps
    metadata = {} if prefix is None else {PREFIX: prefix.facts}
    first = trained_record(name, name, 0.0, (version,) * own)
    steps_of = tuple(replace(step, step_index=step.step_index + steps - own) for step in first.steps)
    changes = {"prompt_key": "key", "metadata": metadata, "steps": steps_of, **changes}
    return [
        replace(first, trajectory_id=f"{name}/{n}", reward=float(n < passed), **changes) for n in range(passed + failed)
    ]


@st.composite
def monotone_tasks(draw: st.DrawFn) -> tuple[int, bool, list[int]]:
    """Steps of an attempt, whether a head start is needed, and how many of 16 attempts pass behind each cut."""
    steps = draw(st.integers(2, 24))
    # From the beginning, one attempt is not like the others: it is the source.
    passed = [1, *sorted(draw(st.lists(st.integers(1, 16), min_size=steps - 1, max_size=steps - 1)))]
    helps = draw(st.booleans())
    return steps, helps, passed if helps else [16 - each for each in passed]


@given(monotone_tasks())
def test_the_rate_of_a_skewed_task_comes_as_near_to_one_half_as_its_cuts_allow(
    task: tuple[int, bool, list[int]],
) -> None:
    steps, helps, seen = task
    members = 16
    sampler = PrefixSampler(replace(RULE, again=100))
    posterior = [(each + 1) / (members + 2) for each in seen]
    reachable = min(posterior[1:], key=lambda rate: abs(rate - 0.5))
    again = sampler.observe(group("g0", seen[0], members - seen[0], steps))
    assert again, "there is a source, and 1/16 is skewed"
    cuts: list[int] = []
    for number in range(1, 2 + math.ceil(math.log2(steps))):
        prefix = sampler.prefix_for("math", "key")
        if prefix is None:
            break
        assert prefix.source == ("g0/0" if helps else f"g0/{members - 1}")
        assert 0 < prefix.steps < steps, "never all of an attempt"
        cuts.append(prefix.steps)
        passed = seen[prefix.steps]
        if not sampler.observe(group(f"g{number}", passed, members - passed, steps, prefix=prefix)):
            break
    last = sampler.prefix_for("math", "key")
    if not RULE.is_skewed(reachable):
        assert last is not None and not RULE.is_skewed(posterior[last.steps])
    else:
        # No cut fits: what is chosen is as near as any, or none where scratch is.
        chosen = posterior[0 if last is None else last.steps]
        assert abs(chosen - 0.5) <= abs(reachable - 0.5) + 1e-9
    assert len(cuts) == len(set(cuts)), "no cut is tried twice before it fits"


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 60)), max_size=30), st.data())
def test_sources_are_fresh_and_equal_groups_give_equal_prefixes(
    groups: Sequence[tuple[int, int, int]], data: st.DataObject
) -> None:
    rule = PrefixRule(max_age=5)
    samplers = [PrefixSampler(rule), PrefixSampler(rule)]
    versions: dict[str, int] = {}
    newest = 0
    for number, (passed, failed, version) in enumerate(groups):
        prefixes = [sampler.prefix_for("math", "key") for sampler in samplers]
        assert (prefixes[0] and prefixes[0].facts) == (prefixes[1] and prefixes[1].facts)
        if prefixes[0] is not None:
            assert versions[prefixes[0].source] >= newest - rule.max_age
        behind = prefixes[0] if data.draw(st.booleans()) else None
        records = group(f"g{number}", passed, failed, 6, version, behind)
        versions.update(dict.fromkeys((record.trajectory_id for record in records), version))
        again = [sampler.observe(records) for sampler in samplers]
        assert again[0] == again[1]
        newest = max(newest, version) if records else newest


@pytest.mark.parametrize(
    ("passed", "failed", "expected"),
    [(1, 7, "g/0"), (7, 1, "g/7"), (4, 4, None), (3, 5, None), (0, 8, None), (8, 0, None), (1, 0, None)],
)
def test_a_task_is_skewed_if_few_or_most_attempts_pass(passed: int, failed: int, expected: str | None) -> None:
    sampler = PrefixSampler(RULE)
    again = sampler.observe(group("g", passed, failed))
    prefix = sampler.prefix_for("math", "key")
    assert again == (prefix is not None)
    assert (prefix and prefix.source) == expected
    assert prefix is None or prefix.steps == 2, "the middle first"


def test_a_task_is_asked_again_until_it_fits_or_was_asked_often_enough() -> None:
    sampler = PrefixSampler(RULE)
    assert sampler.observe(group("a", 1, 7, 9))
    first = sampler.prefix_for("math", "key")
    assert first is not None and first.steps == 4
    assert sampler.observe(group("b", 8, 0, 9, prefix=first)), "too much of a head start"
    second = sampler.prefix_for("math", "key")
    assert second is not None and second.steps == 2
    assert not sampler.observe(group("c", 8, 0, 9, prefix=second)), "it was asked twice"
    third = sampler.prefix_for("math", "key")
    assert third is not None and third.steps == 1
    assert not sampler.observe(group("d", 6, 2, 9, prefix=third)), "no other cut is left"
    assert sampler.prefix_for("math", "key") is not None, "but this one is nearer to one half than none"


def test_late_members_count_for_the_rate_and_neither_ask_again_nor_count_as_asked() -> None:
    sampler = PrefixSampler(RULE)
    assert not sampler.observe(group("a", 1, 7, 9), late=True)
    for name in ("b", "c"):
        assert sampler.observe(group(name, 0, 1, 9, prefix=sampler.prefix_for("math", "key")))
        assert not sampler.observe(group(f"{name}+late", 0, 1, 9, prefix=sampler.prefix_for("math", "key")), late=True)
    assert sampler.prefix_for("math", "key") is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "truncated"},
        {"prefix": TrajectoryPrefix.of(group("other", 1, 0)[0], 1)},
        {"steps": 1},
    ],
)
def test_what_cannot_be_a_source(changes: dict[str, Any]) -> None:
    sampler = PrefixSampler(RULE)
    steps = changes.pop("steps", 4)
    assert not sampler.observe(group("a", 1, 7, steps, **changes))
    assert sampler.prefix_for("math", "key") is None


@pytest.mark.parametrize("own", ["of a path", {"source": 1}, {"source": "a/0", "steps": 2}])
def test_what_a_program_stores_by_the_name_of_prefixes_is_its_own(own: Any) -> None:
    sampler = PrefixSampler(RULE)
    assert sampler.observe(group("a", 1, 7, metadata={PREFIX: own}))
    prefix = sampler.prefix_for("math", "key")
    assert prefix is not None and (prefix.source, prefix.steps) == ("a/0", 2)


def test_a_refused_environment_begins_from_scratch() -> None:
    sampler = PrefixSampler(RULE)
    assert sampler.observe(group("a", 1, 7))
    assert sampler.refuse("math") and not sampler.refuse("math")
    assert sampler.prefix_for("math", "key") is None
    assert not sampler.observe(group("b", 1, 7, environment="math"))


def test_rules_and_prefixes_are_checked() -> None:
    for values in ({"margin": 0.5}, {"margin": math.nan}, {"max_age": 0}, {"again": -1}, {"passes_from": math.inf}):
        with pytest.raises(BadInput):
            PrefixRule(**values)
    record = group("a", 1, 0)[0]
    for steps in (0, 4, True, -1):
        with pytest.raises(BadInput, match="use 1 to 3"):
            TrajectoryPrefix.of(record, steps)
    prefix = TrajectoryPrefix.of(record, 2)
    context = record.steps[2].token_start
    assert prefix.token_ids.tolist() == record.branches[0].token_ids[:context].tolist()
    assert prefix.facts == {"source": "a/0", "steps": 2, "tokens": context, "sampled_tokens": 8}
    shorter = TrajectoryPrefix.of(record, 3).first(2)
    assert shorter.facts == prefix.facts and shorter.token_ids.tolist() == prefix.token_ids.tolist()
