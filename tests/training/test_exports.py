"""Batches in the forms of other trainers: the numbers that arrive are those that were sampled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
from click.testing import CliRunner
from worlds.training_builders import assert_same_batch, finished_group, sampled_step, trained_record

from heddle_dask.cli.main import heddle
from heddle_dask.core.errors import BadInput
from heddle_dask.records.store import RunStore
from heddle_dask.training.batch_files import batch_path, load_batch, save_batch, stored_batches
from heddle_dask.training.exports.prime_rl import write_prime_rl_step
from heddle_dask.training.exports.verl import read_verl_step, verl_columns, write_verl_step
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.groups import FinishedGroup, TrainingBatch
from heddle_dask.training.sample_rows import SampleRow, sample_rows

# The required fields of prime-rl's MicroBatch, in their order (transports/rollouts/types.py at 559b447).
MICRO_BATCH = (
    ("input_ids", "list[int]"),
    ("loss_mask", "list[bool]"),
    ("advantages", "list[float]"),
    ("inference_logprobs", "list[float]"),
    ("position_ids", "list[int]"),
    ("sequence_lengths", "list[int]"),
    ("temperatures", "list[float]"),
    ("env_names", "list[str]"),
    ("seq_lens", "list[int]"),
)


def branched_group(temperature: float = 0.5) -> FinishedGroup:
    """One member of two branches and one of two steps."""
    first = trained_record("g/0", "g", 1.0, versions=(0,), tokens=2, temperature=temperature)
    fork = first.branches[0].shared()
    start = len(fork)
    fork.append_sampled([50, 51], [-1.5, -2.5], 1)
    step = sampled_step(1, start, start + 2, branch=1, temperature=temperature)
    first = replace(first, branches=(first.branches[0], fork), steps=(*first.steps, step))
    second = trained_record("g/1", "g", 0.0, versions=(0, 1), tokens=2, temperature=temperature)
    return FinishedGroup("g", "task-of-g", "math", (first, second))


def a_batch(temperature: float = 0.5) -> TrainingBatch:
    return TrainingBatch(3, "a", (trajectory_group(branched_group(temperature), "a"),))


def rows(temperature: float = 0.5) -> list[SampleRow]:
    return list(sample_rows(a_batch(temperature)))


def test_rows_have_one_entry_for_each_token_and_count_a_reward_once():
    first, fork, second = rows()
    assert [row.first_of_trajectory for row in (first, fork, second)] == [True, False, True]
    assert [(row.advantage, row.reward, row.staleness) for row in (first, fork, second)] == [
        (0.5, 1.0, 2),
        (0.5, 1.0, 2),
        (-0.5, 0.0, 2),
    ]
    assert fork.token_ids.tolist() == [1, 2, 3, 10, 11, 50, 51]
    assert fork.token_advantages.tolist() == [0.0] * 5 + [0.5] * 2
    assert sum(row.trained.sum() for row in (first, fork, second)) == 8


def test_prime_rl_decodes_its_micro_batches(tmp_path):
    """With its own struct definition, where msgspec is installed; without it, by the order of the fields."""
    write_prime_rl_step(rows(), tmp_path, step=3, ranks=2)
    folder = tmp_path / "rollouts" / "step_2"
    assert sorted(path.name for path in folder.iterdir()) == ["rank_0.bin", "rank_1.bin"]
    decoded = [msgpack.unpackb((folder / f"rank_{rank}.bin").read_bytes()) for rank in range(2)]
    assert [len(rank) for rank in decoded] == [2, 2]
    names = [name for name, _ in MICRO_BATCH]
    first, fork, second, idle = (dict(zip(names, decoded[at % 2][at // 2], strict=True)) for at in range(4))
    assert first["input_ids"] == [1, 2, 3, 10, 11]
    assert fork["loss_mask"] == [False] * 5 + [True] * 2
    assert fork["inference_logprobs"] == [0.0] * 5 + [-1.5, -2.5]
    assert fork["temperatures"] == [1.0] * 5 + [0.5] * 2
    assert second["advantages"] == [0.0] * 3 + [-0.5] * 2 + [0.0] * 2 + [-0.5] * 2
    assert second["position_ids"] == list(range(9)) and second["seq_lens"] == second["sequence_lengths"] == [9]
    assert idle["input_ids"] == first["input_ids"] and not any(idle["loss_mask"])
    with pytest.raises(BadInput, match="step_2 exists"):
        write_prime_rl_step(rows(), tmp_path, step=3)


def test_msgspec_decodes_the_struct_of_prime_rl(tmp_path):
    msgspec = pytest.importorskip("msgspec")
    types = {
        "list[int]": list[int],
        "list[bool]": list[bool],
        "list[float]": list[float],
        "list[str]": list[str],
    }
    struct = msgspec.defstruct(
        "MicroBatch",
        [*((name, types[kind]) for name, kind in MICRO_BATCH), ("ref_logprobs", list[float] | None, None)],
        array_like=True,
    )
    write_prime_rl_step(rows(), tmp_path, step=1)
    found = msgspec.msgpack.decode((tmp_path / "rollouts/step_0/rank_0.bin").read_bytes(), type=list[struct])
    assert [one.input_ids for one in found] == [row.token_ids.tolist() for row in rows()]
    assert [one.loss_mask for one in found] == [row.trained.tolist() for row in rows()]


def test_verl_columns(tmp_path):
    write_verl_step(rows(), tmp_path, step=3, pad_token_id=9)
    found = read_verl_step(tmp_path / "step-000003.npz")
    for name, column in verl_columns(rows(), pad_token_id=9).items():
        assert found[name].dtype == column.dtype
        np.testing.assert_array_equal(found[name], column)
    assert found["prompts"].tolist() == [[9, 9, 1, 2, 3], [1, 2, 3, 10, 11], [9, 9, 1, 2, 3]]
    assert found["responses"].tolist() == [[10, 11, 9, 9, 9, 9], [50, 51, 9, 9, 9, 9], [10, 11, 7, 8, 10, 11]]
    assert found["response_mask"].tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1]]
    assert found["rollout_log_probs"][1].tolist() == [-1.5, -2.5, 0, 0, 0, 0]
    assert found["attention_mask"].sum(axis=1).tolist() == [len(row) for row in rows()]
    assert found["position_ids"][0].tolist() == [0, 0, 0, 1, 2, 3, 4, 4, 4, 4, 4]
    assert found["rm_scores"].sum(axis=1).tolist() == [1.0, 0.0, 0.0]  # a reward counts once
    assert found["rm_scores"][0].tolist() == [0, 1, 0, 0, 0, 0]
    assert found["advantages"][2].tolist() == [-0.5, -0.5, 0, 0, -0.5, -0.5]
    assert found["uid"].tolist() == ["g", "g", "g"]


def test_verl_takes_one_temperature():
    mixed = [*rows(0.5), *rows(1.0)]
    with pytest.raises(BadInput, match=r"at 2 temperatures, from 0\.5 to 1: verl takes one"):
        verl_columns(mixed)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored run of three groups: one without variance, and one whose members are not side by side."""
    path = tmp_path_factory.mktemp("run") / "x.zarr"
    g, h = finished_group("g"), finished_group("h")
    same = finished_group("same", (1.0, 1.0))
    with RunStore.create(path, {}) as store:
        store.append([g.records[0], *h.records, *same.records, g.records[1]])
    return path


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(heddle, ["export", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_stored_run_is_exported_in_steps(run, tmp_path):
    code, output = invoke(run, tmp_path / "out", "--as", "npz", "--groups-per-step", 1, "--json")
    assert code == 0
    counts = json.loads(output)
    assert (counts["steps"], counts["groups"], counts["sequences"], counts["groups_left_out"]) == (2, 2, 4, 1)
    batches = list(stored_batches(tmp_path / "out"))
    assert [[g.group_id for g in batch.groups] for batch in batches] == [["g"], ["h"]]
    code, output = invoke(run, tmp_path / "again", "--as", "npz")
    assert code == 0 and output.endswith("1 groups left out (rewards are equal or unknown)\n")
    code, output = invoke(run, tmp_path / "trl", "--as", "trl")
    assert code == 2 and "TRL reads no files" in output
    code, output = invoke(run, tmp_path / "out", "--as", "npz")
    assert (code, output.count("\n")) == (2, 1) and "exists: choose another folder" in output


def test_the_batches_of_a_training_are_exported_as_they_are(run, tmp_path):
    save_batch(a_batch(), batch_path(tmp_path / "training" / "batches", 3))
    for form in ("npz", "prime-rl", "verl"):
        code, output = invoke(tmp_path / "training", tmp_path / form, "--as", form)
        assert code == 0, output
        assert "1 steps, 1 groups, 3 sequences, 8 tokens" in output
    assert_same_batch(load_batch(tmp_path / "npz" / "step-000003.npz"), a_batch())
    code, output = invoke(tmp_path / "training", tmp_path / "x", "--as", "npz", "--groups-per-step", 1)
    assert code == 2 and "is for a stored run" in output


def test_parquet_is_the_form_without_an_option(run, tmp_path):
    pytest.importorskip("pyarrow")
    code, output = invoke(run, tmp_path / "x.parquet")
    assert (code, output) == (0, f"{tmp_path}/x.parquet: 6 rows\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing", "out", "--as", "npz"), "no batches in missing"),
        (("missing", "out"), "no run at missing"),
        (("RUN", "out", "--as", "npz", "--advantages", "best"), "no such function"),
        (("RUN", "out", "--as", "npz", "--groups-per-step", "0"), "groups per step is 0"),
        (("RUN", "out", "--as", "prime-rl", "--ranks", "0"), "ranks is 0"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, output = invoke(*(str(run) if one == "RUN" else one for one in arguments))
    assert (code, output.count("\n")) == (2, 1)
    assert said in output
