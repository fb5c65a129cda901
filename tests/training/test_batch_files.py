"""Batch files: exact, complete or absent, and refused where they are not what was written."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from worlds.training_builders import assert_same_batch, finished_group

from heddle_dask.core.errors import BadInput, WriteFailed
from heddle_dask.training.batch_files import batch_path, load_batch, save_batch
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.groups import TrainingBatch, TrajectoryGroup


def a_batch() -> TrainingBatch:
    group = trajectory_group(finished_group("g", (0.1, 1 / 3, -0.0)), "a")
    late = trajectory_group(finished_group("g+1", (1e-300,), late_for="g"), "a", (0.1, 1 / 3, -0.0))
    assert isinstance(group, TrajectoryGroup) and isinstance(late, TrajectoryGroup)
    first, *others = group.members
    group = replace(group, members=(replace(first, masked=True, turn_rewards=(0.1,)), *others))
    return TrainingBatch(12, "a", (group, late))


def test_a_batch_comes_back_exactly(tmp_path):
    path = batch_path(tmp_path / "batches", 12)
    save_batch(a_batch(), path)
    save_batch(a_batch(), path)  # replaces
    assert path.name == "step-000012.npz"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert_same_batch(load_batch(path), a_batch())


def test_an_empty_batch_comes_back(tmp_path):
    save_batch(TrainingBatch(1, "a", ()), tmp_path / "b.npz")
    assert load_batch(tmp_path / "b.npz").groups == ()


def test_numpy_alone_reads_it(tmp_path):
    save_batch(a_batch(), tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz", allow_pickle=False) as file:
        header = json.loads(str(file["header"]))
        assert header["groups"][0]["members"][1]["reward"] == 1 / 3
        assert file["token_ids"][file["trained"]].tolist() == [10, 11, 12, 13] * 4


def test_a_file_of_a_version_without_turns_is_read(tmp_path):
    save_batch(a_batch(), tmp_path / "b.npz")
    with np.load(tmp_path / "b.npz", allow_pickle=False) as file:
        columns = {name: file[name] for name in file if name not in ("header", "turns")}
        header = json.loads(str(file["header"]))
    for group in header["groups"]:
        for member in group["members"]:
            del member["masked"], member["turn_rewards"]
    np.savez(tmp_path / "older.npz", header=np.array(json.dumps(header)), **columns)
    (first, _, _), _ = (group.members for group in load_batch(tmp_path / "older.npz").groups)
    assert not first.masked and first.sequences[0].turns.tolist() == [-1] * 3 + [0] * 4


def test_every_cut_of_the_file_is_refused_in_one_line(tmp_path):
    save_batch(a_batch(), tmp_path / "b.npz")
    whole = (tmp_path / "b.npz").read_bytes()
    for size in range(0, len(whole), 97):
        (tmp_path / "cut.npz").write_bytes(whole[:size])
        with pytest.raises(BadInput) as refused:
            load_batch(tmp_path / "cut.npz")
        assert "cut.npz" in str(refused.value) and "\n" not in str(refused.value)


def test_a_changed_token_is_refused(tmp_path):
    save_batch(a_batch(), tmp_path / "b.npz")
    changed = bytearray((tmp_path / "b.npz").read_bytes())
    at = changed.index(np.array([10, 11, 12, 13], np.int32).tobytes())
    changed[at] = 99
    (tmp_path / "b.npz").write_bytes(changed)
    with pytest.raises(BadInput, match="cannot read the batch"):
        load_batch(tmp_path / "b.npz")


def test_other_files_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(BadInput, match="cannot read the batch"):
        load_batch(tmp_path / "other.npz")
    with pytest.raises(BadInput, match="no batch at"):
        load_batch(tmp_path / "missing.npz")
    (tmp_path / "file").touch()
    with pytest.raises(WriteFailed, match="cannot write"):
        save_batch(a_batch(), tmp_path / "file" / "b.npz")
