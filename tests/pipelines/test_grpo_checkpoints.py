"""Checkpoints: a restart goes on with the same bits, other programs load them, and the right ones are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds.training_batches import AGENT, stored_batch

from heddle_dask import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.trainer_spec import TrainerSpec
from heddle_dask.weights.store import WeightStore, read_manifest
from pipelines.grpo.checkpoint_folder import CheckpointFolder, CheckpointRecord
from pipelines.grpo.learner import Learner, stored_report
from pipelines.grpo.publishing import publish


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def spec_in(folder: Path, **changed: Any) -> TrainerSpec:
    return replace(TrainerSpec(str(AGENT), str(folder / "checkpoints"), "a", learning_rate=1e-3), **changed)


def train(learner: Learner, folder: Path, *numbers: int) -> Path:
    """Train on the batches of these numbers; returns the newest checkpoint."""
    for number in numbers:
        learner.train(stored_batch(folder, number), PolicyVersion(learner.spec.lineage, number))
    assert learner.state.checkpoint is not None
    return learner.state.checkpoint


def weights(checkpoint: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(checkpoint / name)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("changed", [{"parts": 2, "kl_coefficient": 0.1}, {"lora_rank": 4}])
def test_a_restart_goes_on_with_the_same_bits(tmp_path: Path, changed: dict[str, Any]) -> None:
    name = "adapter_model.safetensors" if "lora_rank" in changed else "model.safetensors"
    straight = train(Learner(spec_in(tmp_path / "one", **changed)), tmp_path / "one", 1, 2, 3, 4)
    train(Learner(spec_in(tmp_path / "two", **changed)), tmp_path / "two", 1, 2)
    torch.rand(7)  # whatever happens to random generators between the processes
    resumed = Learner(spec_in(tmp_path / "two", **changed))
    assert resumed.state.version == PolicyVersion("a", 2)
    after = train(resumed, tmp_path / "two", 3, 4)
    assert same(weights(straight, name), weights(after, name))
    first = weights(tmp_path / "one" / "checkpoints" / "step-000002", name)
    assert not same(first, weights(straight, name)), "it does train"


def test_weights_of_two_bytes_are_resumed_in_four(tmp_path: Path) -> None:
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(AGENT, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(AGENT).save_pretrained(half)
    spec = spec_in(tmp_path / "one", model=str(half), learning_rate=1e-5)
    straight = train(Learner(spec), tmp_path / "one", 1, 2)
    other = spec_in(tmp_path / "two", model=str(half), learning_rate=1e-5)
    train(Learner(other), tmp_path / "two", 1)
    resumed = train(Learner(other), tmp_path / "two", 2)
    assert {tensor.dtype for tensor in weights(resumed).values()} == {torch.bfloat16}
    masters = [torch.load(path / "trainer.pt")["master"] for path in (straight, resumed)]
    assert same(*masters)
    assert {tensor.dtype for tensor in masters[0].values()} == {torch.float32}


def test_a_checkpoint_is_a_model_directory(tmp_path: Path) -> None:
    learner = Learner(spec_in(tmp_path))
    checkpoint = train(learner, tmp_path, 1)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert same(dict(loaded.state_dict()), {k: v.detach() for k, v in learner._policy.model.state_dict().items()})
    assert loaded.dtype == torch.float32
    assert len(AutoTokenizer.from_pretrained(checkpoint)) == len(AutoTokenizer.from_pretrained(AGENT))
    assert (checkpoint / "config.json").read_bytes() == (AGENT / "config.json").read_bytes()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "a", keep=2)
    for number in range(1, 6):
        folder.write(CheckpointRecord("a", number, "m"), lambda path: (path / "w").write_text("w"))
        if number in (1, 2):
            folder.keep_best(PolicyVersion("a", number), 0.5 * number)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best.json",
        "step-000002",
        "step-000004",
        "step-000005",
    ]
    assert folder.best() == {"lineage": "a", "number": 2, "reward": 1.0, "checkpoint": "step-000002"}
    with pytest.raises(BadInput, match="checkpoint a:3 has been removed"):
        folder.keep_best(PolicyVersion("a", 3), 2.0)
    newest = folder.newest()
    assert newest is not None and newest[1].version == PolicyVersion("a", 5)


def test_half_a_checkpoint_does_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "a", keep=2)
    folder.write(CheckpointRecord("a", 1, "m"), lambda path: None)

    def die(path: Path) -> None:
        (path / "w").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.write(CheckpointRecord("a", 2, "m"), die)
    assert folder.find(PolicyVersion("a", 2)) is None
    folder.write(CheckpointRecord("a", 2, "m"), lambda path: None)
    assert [path.name for path in sorted(tmp_path.glob("step-000002/*"))] == ["trainer.json"]


def test_a_new_line_begins_with_an_old_checkpoint_and_overwrites_nothing(tmp_path: Path) -> None:
    train(Learner(spec_in(tmp_path)), tmp_path, 1, 2)
    start = tmp_path / "checkpoints" / "step-000001"
    learner = Learner(spec_in(tmp_path, lineage="b", start=str(start)))
    assert learner.state.version == PolicyVersion("b", 1) and learner.state.checkpoint == start
    learner.train(stored_batch(tmp_path / "b", 2, seed=9, lineage="b"), PolicyVersion("b", 2))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000001", "step-000002", "step-000002.a"]
    assert Learner(spec_in(tmp_path)).state.version == PolicyVersion("a", 2)


def test_a_batch_is_trained_once_and_in_order(tmp_path: Path) -> None:
    learner = Learner(spec_in(tmp_path))
    report = learner.train(stored_batch(tmp_path, 1), PolicyVersion("a", 1))
    again = stored_report(learner.folder, PolicyVersion("a", 1))
    assert again is not None and again.metrics == report.metrics
    for version, step, message in [
        (PolicyVersion("a", 1), 1, "does not follow a:1"),
        (PolicyVersion("a", 3), 3, "does not follow a:1"),
        (PolicyVersion("b", 2), 2, "of another lineage"),
        (PolicyVersion("a", 2), 1, "batch 1 cannot give version a:2"),
    ]:
        with pytest.raises(BadInput, match=message):
            learner.train(stored_batch(tmp_path, step), version)
    assert learner.state == report.state


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = train(Learner(spec_in(tmp_path)), tmp_path, 1)
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(AGENT)
    model.config.vocab_size = 330
    model.resize_token_embeddings(330)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(AGENT).save_pretrained(other)
    with pytest.raises(BadInput, match="of another model") as refused:
        Learner(spec_in(tmp_path / "new", model=str(other), start=str(checkpoint)))
    assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="is no checkpoint"):
        Learner(spec_in(tmp_path / "new", start=str(other)))
    with pytest.raises(BadInput, match=r"no readable config\.json"):
        Learner(spec_in(tmp_path / "new", model=str(tmp_path / "nothing")))


def test_published_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    learner = Learner(spec_in(tmp_path))
    checkpoint = train(learner, tmp_path, 1)
    store = str(tmp_path / "weights")
    uri = publish(AGENT, checkpoint, PolicyVersion("a", 1), store)
    assert publish(AGENT, checkpoint, PolicyVersion("a", 1), store) == uri
    manifest = read_manifest(uri)
    assert manifest.kind == "full" and manifest.version == PolicyVersion("a", 1)
    stored: dict[str, torch.Tensor] = {}
    for bucket in manifest.buckets:
        stored |= load_file(Path(uri).parent / bucket.file)
    assert same(stored, weights(checkpoint))


def test_an_adapter_is_trained_published_and_merged(tmp_path: Path) -> None:
    learner = Learner(spec_in(tmp_path, lora_rank=4, lora_alpha=8.0, kl_coefficient=0.1))
    report = learner.train(stored_batch(tmp_path, 1), PolicyVersion("a", 1))
    assert report.metrics["kl"] == pytest.approx(0.0, abs=1e-9), "before the first step it is the model itself"
    checkpoint = train(learner, tmp_path, 2)
    uri = publish(AGENT, checkpoint, PolicyVersion("a", 2), str(tmp_path / "weights"))
    manifest = WeightStore(str(tmp_path / "weights")).newest("a")
    assert manifest is not None and manifest.adapter is not None
    assert (manifest.kind, manifest.adapter.rank, manifest.adapter.scale) == ("adapter", 4, 2.0)
    assert manifest.nbytes < sum(tensor.nbytes for tensor in weights(AGENT).values()) / 4
    assert all("lora_" in tensor.name for tensor in manifest.tensors)
    assert Path(uri).exists()
    learner.export_merged(tmp_path / "merged")
    # A broadcast sends whole weights.
    broadcast = f"collective://127.0.0.1:29600{tmp_path}/broadcast"
    publish(AGENT, checkpoint, PolicyVersion("a", 2), broadcast)
    whole = WeightStore(broadcast).newest("a")
    assert whole is not None and whole.kind == "full"
    assert {tensor.name for tensor in whole.tensors} == set(weights(AGENT))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(40)[None]
    learner._policy.model.eval()
    with torch.no_grad():
        expected = learner._policy.model(input_ids=ids, use_cache=False).logits
        plain = AutoModelForCausalLM.from_pretrained(AGENT)(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (plain - expected).abs().max() > 1e-3
    with pytest.raises(BadInput, match="exists"):
        learner.export_merged(tmp_path / "merged")
    # transformers finds the base through the adapter's own configuration.
    adapted = AutoModelForCausalLM.from_pretrained(checkpoint)
    torch.testing.assert_close(adapted(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
