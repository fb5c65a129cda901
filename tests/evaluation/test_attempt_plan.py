"""What an evaluation still has to do: what lacks samples, in batches that the same command goes on with."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.record_builders import plain_trajectory, steady

from heddle_dask.core.errors import BadInput
from heddle_dask.evaluation.attempt_outcomes import outcome_of
from heddle_dask.evaluation.attempt_plan import FILE, ArmIdentity, EvaluationFile, missing_batches, samples_by_task

PLAIN = outcome_of(plain_trajectory(0))


@steady
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=6), st.integers(1, 5))
def test_batches_bring_each_task_to_the_samples_asked_for(had: list[tuple[int, int]], samples: int) -> None:
    ids = [f"t{number}" for number in range(len(had))]
    lost = replace(PLAIN, status="failed", cause="sandbox", reward=None)
    outcomes = [
        replace(each, task_id=task)
        for task, (kept, failed) in zip(ids, had, strict=True)
        for each in [PLAIN] * kept + [lost] * failed
    ]
    batches = missing_batches(ids, samples_by_task(outcomes), samples, seed=7, made=2)
    made = Counter({task: kept for task, (kept, _) in zip(ids, had, strict=True)})
    for batch in batches:
        assert len(set(batch.task_ids)) == len(batch.task_ids)
        made.update(dict.fromkeys(batch.task_ids, batch.samples))
    assert all(made[task] == max(samples, kept) for task, (kept, _) in zip(ids, had, strict=True))
    assert len({batch.seed for batch in batches}) == len(batches) and 7 not in {batch.seed for batch in batches}


def test_the_first_batch_has_all_attempts_and_the_seed_of_the_evaluation() -> None:
    (batch,) = missing_batches(["a", "b"], {}, 4, seed=7, made=0)
    assert (batch.task_ids, batch.samples, batch.seed, len(batch)) == (("a", "b"), 4, 7, 8)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    arm = ArmIdentity("math", "/models/a", "codex")
    plan = EvaluationFile(3).with_batches(arm, missing_batches(["a"], {}, 2, 3, 0))
    plan.write(tmp_path / "new")
    assert EvaluationFile.read(tmp_path / "new") == plan
    assert EvaluationFile.read(tmp_path / "none") is None


@pytest.mark.parametrize("content", ["", "[]", '{"format": "other"}', '{"format":"heddle-evaluation","version":1}'])
def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(BadInput, match="is no file of heddle eval"):
        EvaluationFile.read(tmp_path)


def test_a_directory_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(BadInput, match="is no evaluation"):
        EvaluationFile.read(tmp_path)


@pytest.mark.parametrize(
    ("arms", "titles"),
    [
        ([("math", "/m/a", "")], ["math · a"]),
        ([("math", "/m/a", ""), ("math", "/m/b", "")], ["a", "b"]),
        ([("d", "/m/a", "codex"), ("d", "/m/a", "x.toml")], ["codex", "x.toml"]),
        ([("d", "/1/check", ""), ("d", "/2/check", "")], ["1/check", "2/check"]),
    ],
)
def test_a_title_says_what_tells_an_arm_from_the_others(arms: Any, titles: list[str]) -> None:
    identities = [ArmIdentity(*each) for each in arms]
    assert [each.title(identities) for each in identities] == titles or len(arms) == 1
    assert [each.title([o for o in identities if o is not each]) for each in identities] == titles
    assert len({each.slug for each in identities}) == len(identities)
