"""Training batches in PyTorch: the dataset, and the tensors that verl takes."""

from __future__ import annotations

import pytest
from worlds.training_builders import finished_group

from heddle_dask.core.errors import BadInput
from heddle_dask.training.batch_files import batch_path, save_batch, stored_batches
from heddle_dask.training.exports.verl import write_verl_step
from heddle_dask.training.group_records import trajectory_group
from heddle_dask.training.groups import TrainingBatch
from heddle_dask.training.sample_rows import sample_rows

torch = pytest.importorskip("torch")


def batch(step: int) -> TrainingBatch:
    return TrainingBatch(step, "a", (trajectory_group(finished_group(f"g{step}"), "a"),))


def test_a_data_loader_reads_the_stored_batches(tmp_path):
    from torch.utils.data import DataLoader

    from pipelines.any_trainer.dataset import IGNORED_LABEL, SampleDataset

    for step in (1, 2):
        save_batch(batch(step), batch_path(tmp_path / "batches", step))
    loader = DataLoader(SampleDataset(lambda: stored_batches(tmp_path), pad_token_id=9), batch_size=None)
    for _ in range(2):  # it can be read again
        found = list(loader)
        assert [one["step"] for one in found] == [1, 2]
    one = found[0]
    assert one["input_ids"].shape == one["logprobs"].shape == (2, 7)
    assert one["input_ids"][0].tolist() == [1, 2, 3, 10, 11, 12, 13]
    assert one["labels"][0].tolist() == [IGNORED_LABEL] * 3 + [10, 11, 12, 13]
    assert one["logprobs"][one["trained"]].tolist() == [-0.25, -0.5, -0.75, -1.0] * 2
    assert torch.isnan(one["logprobs"][~one["trained"]]).all()
    assert one["advantages"].tolist() == [-0.5, 0.5]
    assert one["token_advantages"].tolist() == [[0] * 3 + [-0.5] * 4, [0] * 3 + [0.5] * 4]
    assert one["group_ids"] == ["g1", "g1"]


def test_two_workers_would_read_every_batch_twice(tmp_path):
    from torch.utils.data import DataLoader

    from pipelines.any_trainer.dataset import SampleDataset

    loader = DataLoader(SampleDataset(lambda: iter(())), batch_size=None, num_workers=2)
    with pytest.raises(BadInput, match="num_workers is 2: use 0 or 1"):
        list(loader)


def test_the_tensors_of_a_data_proto(tmp_path):
    from heddle_dask.training.exports.verl import read_verl_step
    from pipelines.any_trainer.verl_batches import verl_tensors

    write_verl_step(list(sample_rows(batch(1))), tmp_path, 1)
    tensors, texts, meta = verl_tensors(read_verl_step(tmp_path / "step-000001.npz"))
    assert meta == {"temperature": 1.0}
    assert {one.shape[0] for one in tensors.values()} == {2}
    assert tensors["responses"].dtype == torch.int64
    assert {name: one.tolist() for name, one in texts.items()} == {
        "uid": ["g1", "g1"],
        "data_source": ["math", "math"],
        "trajectory_id": ["g1/0", "g1/1"],
    }
