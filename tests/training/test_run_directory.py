"""RUN_DIR: what may be made, opened and replaced, and logs that survive a crash."""

import json
from pathlib import Path

import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.training.json_lines import append_lines, read_lines, write_lines
from heddle_dask.training.run_directory import DirectoryMode, TrainingDirectory
from heddle_dask.training.step_row import StepSeconds
from heddle_dask.training.training_result import reward_change, training_result

ASKED = {"environment": "math:train", "groups": 8, "steps": 10}


def test_a_new_directory_says_what_it_is(tmp_path: Path) -> None:
    directory = TrainingDirectory(tmp_path / "run")
    stored = directory.begin(ASKED, "create", "a")
    assert stored["asked"] == ASKED
    assert directory.description() == stored
    with pytest.raises(BadInput, match="go on with it by --resume"):
        directory.check("create")


def test_what_is_no_training_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    directory = TrainingDirectory(tmp_path)
    modes: tuple[DirectoryMode, ...] = ("create", "overwrite")
    for mode in modes:
        with pytest.raises(BadInput, match="is no training"):
            directory.begin(ASKED, mode, "a")
    with pytest.raises(BadInput, match=r"has no run\.json"):
        directory.begin(ASKED, "resume", "a")
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_resumed_training_asks_for_the_same_but_may_do_more_steps(tmp_path: Path) -> None:
    directory = TrainingDirectory(tmp_path / "run")
    directory.begin(ASKED, "create", "a")
    assert directory.begin({**ASKED, "steps": 20}, "resume", "b") == directory.description()
    assert directory.description()["asked"] == ASKED, "until what was trained so is in a checkpoint"
    directory.changes({**ASKED, "steps": 20})
    assert directory.description()["asked"]["steps"] == 20
    assert directory.description()["lineages"] == [{"lineage": "a", "number": 0}]
    with pytest.raises(BadInput, match="groups was 8, and is 4 now"):
        directory.begin({**ASKED, "groups": 4}, "resume", "b")
    directory.begin({**ASKED, "truncated": "count"}, "resume", "b")  # it is older than this option
    with pytest.raises(BadInput, match='truncated was "count", and is "mask" now'):
        directory.begin({**ASKED, "truncated": "mask"}, "resume", "b")


def test_a_line_of_training_that_goes_on_from_an_older_checkpoint_has_another_name(tmp_path: Path) -> None:
    directory = TrainingDirectory(tmp_path / "run")
    directory.begin(ASKED, "create", "a")
    assert [directory.begin_lineage(4), directory.begin_lineage(2)] == ["a.2", "a.3"]
    assert [each["number"] for each in directory.description()["lineages"]] == [0, 4, 2]


def test_overwrite_leaves_nothing_of_the_training_before(tmp_path: Path) -> None:
    directory = TrainingDirectory(tmp_path / "run")
    directory.begin(ASKED, "create", "a")
    directory.add_metrics({"step": 1})
    directory.begin(ASKED, "overwrite", "b")
    assert read_lines(directory.metrics) == []


def test_logs_forget_steps_that_are_done_again(tmp_path: Path) -> None:
    directory = TrainingDirectory(tmp_path / "run")
    directory.begin(ASKED, "create", "a")
    for step in (1, 2, 3):
        directory.add_metrics({"step": step})
    directory.add_evaluation({"number": 3})
    directory.forget_after(2)
    assert [row["step"] for row in read_lines(directory.metrics)] == [1, 2]
    assert read_lines(directory.evaluations) == []


@pytest.mark.parametrize("lost", range(1, 13))
def test_a_torn_last_line_is_no_row(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "log.jsonl"
    append_lines(path, [{"step": 1}, {"step": 2}])
    path.write_bytes(path.read_bytes()[:-lost])
    assert [row["step"] for row in read_lines(path)] == [1]
    write_lines(path, read_lines(path))
    append_lines(path, [{"step": 2, "loss": float("nan")}])
    assert read_lines(path)[1] == {"step": 2, "loss": None}


def test_damage_before_the_end_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(BadInput, match="line 2 is no JSON object"):
        read_lines(path)


def test_the_result_is_of_all_processes_that_trained() -> None:
    rows = [
        _row(1, {"0": 4}, {"no-variance": 10}, 0.2, 100),
        _row(2, {"0": 1, "1": 3}, {"stale": 5}, 0.6, 300),
    ]
    evaluations = [
        {"number": 0, "rewards": {"a": 0.0, "b": 0.5}},
        {"number": 2, "rewards": {"a": 0.5, "b": 1.0}},
    ]
    result = training_result(rows, evaluations, "run", StepSeconds(publish=1.0))
    assert list(result) == [
        *("steps", "samples", "reward_before", "reward_after", "reward_before_ci", "reward_after_ci"),
        *("staleness", "wasted_tokens", "seconds", "logprob_difference_mean", "out"),
    ]
    assert (result["steps"], result["samples"]) == (2, 8)
    assert (result["reward_before"], result["reward_after"]) == (0.25, 0.75)
    assert result["staleness"] == {"0": 5, "1": 3}
    assert result["wasted_tokens"] == {"no-variance": 10, "stale": 5}
    assert result["seconds"] == {"rollout": 2.0, "wait": 0.0, "train": 4.0, "publish": 1.0, "install": 0.0}
    assert result["logprob_difference_mean"] == pytest.approx(0.5)
    change = reward_change(evaluations)
    assert change is not None
    assert change.mean == 0.5


def test_without_evaluations_rewards_are_unknown() -> None:
    result = training_result([], [], "run")
    assert result["reward_before"] is None
    assert json.loads(json.dumps(result))["steps"] == 0


def _row(step: int, ages: dict[str, int], waste: dict[str, int], difference: float, tokens: int) -> dict[str, object]:
    seconds = StepSeconds(rollout=1.0, train=2.0).rounded()
    trainer = {"logprob_difference_mean": difference, "tokens": tokens}
    return {
        "step": step,
        "samples": 4,
        "staleness": ages,
        "wasted_tokens": waste,
        "seconds": seconds,
        "trainer": trainer,
    }
