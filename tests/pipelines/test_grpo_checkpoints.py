"""Checkpoints and published weights: what is stored, what a restart does again, and that the bits are the same."""

from __future__ import annotations

import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds.training_batches import AGENT, stored_batch

from heddle_dask import BadInput
from heddle_dask.core.errors import WriteFailed
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.training.trainer_spec import TrainerSpec
from heddle_dask.weights.store import WeightStore, read_manifest
from pipelines.grpo import checkpoint_folder
from pipelines.grpo.checkpoint_folder import CheckpointFolder, CheckpointRecord, read_record
from pipelines.grpo.ranks import CopiedWeights, Ranks

NEVER = 1e9


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def spec_in(folder: Path, **changed: Any) -> TrainerSpec:
    folders = {"checkpoints": str(folder / "checkpoints"), "batches": str(folder)}
    options = {"learning_rate": 1e-3, "checkpoint_every_s": NEVER, **changed}
    return replace(TrainerSpec(str(AGENT), lineage="a", **folders), **options)


def trainer(folder: Path, **changed: Any) -> Ranks:
    return Ranks(spec_in(folder, **changed), folder / "meeting")


def train(ranks: Ranks, folder: Path, *numbers: int) -> None:
    for number in numbers:
        ranks.train(stored_batch(folder, number), PolicyVersion("a", number))


def weights(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Exactly, with the state of the optimiser."""
    held = ranks.learner._state._tensors()
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone() for name, one in held.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def half_model(folder: Path) -> str:
    AutoModelForCausalLM.from_pretrained(AGENT, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(AGENT).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("changed", [{"parts": 2, "kl_coefficient": 0.1}, {"lora_rank": 4}, {"model": "half"}])
def test_a_restart_does_what_is_in_no_checkpoint_again_with_the_same_bits(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    if "model" in changed:
        changed = {"model": half_model(tmp_path / "half"), "learning_rate": 1e-5}
    straight = trainer(tmp_path / "one", **changed)
    train(straight, tmp_path / "one", 1, 2)
    first = weights(straight)
    train(straight, tmp_path / "one", 3, 4)
    died = trainer(tmp_path / "two", **changed)
    train(died, tmp_path / "two", 1)
    died.save(model=False)
    train(died, tmp_path / "two", 2, 3)
    published = died.weights_of(PolicyVersion("a", 3))
    torch.rand(7)  # whatever happens to random generators between the processes
    resumed = trainer(tmp_path / "two", **changed)
    assert resumed.state.version == PolicyVersion("a", 1)
    again = resumed.weights_of(PolicyVersion("a", 3))
    assert published is not None and again is not None and same({**published.weights}, {**again.weights})
    train(resumed, tmp_path / "two", 4)
    assert same(weights(straight), weights(resumed))
    assert not same(first, weights(straight)), "it does train"
    assert resumed.weights_of(PolicyVersion("a", 3)) is None, "it has newer ones"


def test_the_last_save_is_of_the_last_step_whatever_the_process_had(tmp_path: Path) -> None:
    died = trainer(tmp_path)
    train(died, tmp_path, 1, 2)
    held = weights(died)
    ranks = trainer(tmp_path)
    assert ranks.state.version == PolicyVersion("a", 0)
    state = ranks.save(PolicyVersion("a", 2), model=True)
    assert state.checkpoint == tmp_path / "checkpoints" / "step-000002"
    assert (tmp_path / "checkpoints" / "models" / "step-000002").is_dir()
    assert same(weights(ranks), held)
    with pytest.raises(BadInput, match="a:7 cannot be saved: this trainer has a:2"):
        ranks.save(PolicyVersion("a", 7), model=True)


def test_a_checkpoint_holds_what_there_was_when_it_began_and_is_written_by_time(tmp_path: Path) -> None:
    ranks = trainer(tmp_path, checkpoint_every_s=0)
    train(ranks, tmp_path, 1)
    held = weights(ranks)
    train(ranks, tmp_path, 2)  # while it is written
    assert not same(weights(ranks), held)
    ranks._writer.wait()
    begun = trainer(tmp_path / "new", lineage="b", start=str(tmp_path / "checkpoints" / "step-000001"))
    assert same(weights(begun), held)
    train(ranks, tmp_path, 3)
    ranks._writer.wait()
    assert ranks.state.checkpoint == tmp_path / "checkpoints" / "step-000003"
    assert ranks.state.kept_from in (1, 2)
    train(trainer(tmp_path / "long"), tmp_path / "long", 1)
    assert not (tmp_path / "long" / "checkpoints").exists(), "its time has not come"


def test_a_checkpoint_that_cannot_be_written_is_told_at_the_next_order(tmp_path: Path) -> None:
    ranks = trainer(tmp_path, checkpoint_every_s=0)

    def full(directory: Path) -> Any:
        raise OSError("disk full")

    ranks.learner._state.save = lambda directory: ranks._writer._completing.submit(full, directory)  # type: ignore
    train(ranks, tmp_path, 1)
    with pytest.raises(WriteFailed, match="checkpoint a:1 cannot be written: disk full"):
        ranks._writer.wait()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_model_for_which_there_is_no_room_is_told_in_one_line(tmp_path: Path) -> None:
    ranks = trainer(tmp_path)
    train(ranks, tmp_path, 1)
    ranks.save(model=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(WriteFailed, match=r"cannot write .*models/step-000001: .*File too large") as told:
            ranks.save(model=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(told.value)
    assert not list((tmp_path / "checkpoints" / "models").glob("step-*"))


def test_a_model_is_a_directory_that_other_programs_load(tmp_path: Path) -> None:
    ranks = trainer(tmp_path)
    train(ranks, tmp_path, 1)
    ranks.save(model=True)
    model = tmp_path / "checkpoints" / "models" / "step-000001"
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert same(dict(loaded.state_dict()), {k: v.detach() for k, v in ranks.learner.policy.model.state_dict().items()})
    assert loaded.dtype == torch.float32
    assert len(AutoTokenizer.from_pretrained(model)) == len(AutoTokenizer.from_pretrained(AGENT))
    assert (model / "config.json").read_bytes() == (AGENT / "config.json").read_bytes()


def test_the_newest_checkpoints_and_the_best_model_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "a", keep=2)
    for number in range(1, 6):
        record = CheckpointRecord("a", number, "m")
        (folder.begin(record) / "w").write_text("w")
        folder.complete(record)
        folder.write_model(record, lambda path: None)
        if number in (1, 2):
            folder.keep_best(PolicyVersion("a", number), 0.5 * number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "models", "step-000004", "step-000005"]
    models = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert models == ["step-000002", "step-000004", "step-000005"]
    assert folder.best() == {"lineage": "a", "number": 2, "reward": 1.0, "model": "models/step-000002"}
    with pytest.raises(BadInput, match="weights a:3 are not kept"):
        folder.keep_best(PolicyVersion("a", 3), 2.0)
    newest = folder.newest()
    assert newest is not None and newest[1].version == PolicyVersion("a", 5)


def test_a_checkpoint_that_is_removed_while_others_look_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path, "a", keep=2)
    for number in (1, 2):
        folder.begin(CheckpointRecord("a", number, "m"))
        folder.complete(CheckpointRecord("a", number, "m"))

    def pruned_before(path: Path) -> CheckpointRecord:
        shutil.rmtree(tmp_path / "step-000001", ignore_errors=True)
        return read_record(path)

    monkeypatch.setattr(checkpoint_folder, "read_record", pruned_before)
    assert folder.oldest_number == 2
    (tmp_path / "step-000002" / "trainer.json").write_text("{")
    with pytest.raises(BadInput, match="is no checkpoint"):
        folder.newest()


def test_half_a_checkpoint_does_not_count(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, "a", keep=2)
    folder.begin(CheckpointRecord("a", 1, "m"))
    folder.complete(CheckpointRecord("a", 1, "m"))
    (folder.begin(CheckpointRecord("a", 2, "m")) / "w").write_text("half")
    newest = folder.newest()
    assert newest is not None and newest[1].number == 1
    folder.begin(CheckpointRecord("a", 2, "m"))
    folder.complete(CheckpointRecord("a", 2, "m"))
    assert [path.name for path in sorted(tmp_path.glob("step-000002/*"))] == ["trainer.json"]


def test_a_new_line_begins_with_an_old_checkpoint_and_overwrites_nothing(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    for number in (1, 2):
        train(first, tmp_path, number)
        first.save(model=False)
    start = tmp_path / "checkpoints" / "step-000001"
    ranks = trainer(tmp_path, lineage="b", start=str(start))
    assert ranks.state.version == PolicyVersion("b", 1) and ranks.state.checkpoint == start
    ranks.train(stored_batch(tmp_path / "b", 2, seed=9, lineage="b"), PolicyVersion("b", 2))
    ranks.save(model=False)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000001", "step-000002", "step-000002.a"]
    assert trainer(tmp_path).state.version == PolicyVersion("a", 2)


def test_a_batch_is_trained_once_and_in_order(tmp_path: Path) -> None:
    ranks = trainer(tmp_path)
    report = ranks.train(stored_batch(tmp_path, 1), PolicyVersion("a", 1))
    held = weights(ranks)
    again = ranks.train(tmp_path / "step-000001.npz", PolicyVersion("a", 1))
    assert again == report and same(weights(ranks), held)
    for version, step, message in [
        (PolicyVersion("a", 0), 1, "does not follow a:1"),
        (PolicyVersion("a", 4), 4, "does not follow a:1"),
        (PolicyVersion("b", 2), 2, "of another lineage"),
        (PolicyVersion("a", 2), 1, "batch 1 cannot give version a:2"),
    ]:
        with pytest.raises(BadInput, match=message):
            ranks.train(stored_batch(tmp_path, step), version)
    assert ranks.state == report.state
    with pytest.raises(BadInput, match="a:7 cannot be published: this trainer has a:1"):
        replace_batches(ranks, "").weights_of(PolicyVersion("a", 7))


def replace_batches(ranks: Ranks, folder: str) -> Ranks:
    ranks._spec = replace(ranks._spec, batches=folder)
    return ranks


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    ranks = trainer(tmp_path)
    train(ranks, tmp_path, 1)
    checkpoint = ranks.save(model=False).checkpoint
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(AGENT)
    model.config.vocab_size = 330
    model.resize_token_embeddings(330)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(AGENT).save_pretrained(other)
    with pytest.raises(BadInput, match="of another model") as refused:
        trainer(tmp_path / "new", model=str(other), start=str(checkpoint))
    assert "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="is no checkpoint"):
        trainer(tmp_path / "new", start=str(other))
    with pytest.raises(BadInput, match=r"no readable config\.json"):
        trainer(tmp_path / "new", model=str(tmp_path / "nothing"))
    with pytest.raises(BadInput, match=r"trainer state of checkpoint .* cannot be read"):
        trainer(tmp_path, lora_rank=4)


def test_what_is_published_is_the_copy_whatever_is_trained_meanwhile(tmp_path: Path) -> None:
    ranks = trainer(tmp_path)
    train(ranks, tmp_path, 1)
    copied = ranks.weights_of(PolicyVersion("a", 1))
    assert copied is not None
    ranks.write_model(copied)
    train(ranks, tmp_path, 2)
    publisher, store = ranks.learner.publisher, str(tmp_path / "weights")
    uri = publisher.publish(copied.weights, PolicyVersion("a", 1), store)
    manifest = read_manifest(uri)
    assert manifest.kind == "full" and manifest.version == PolicyVersion("a", 1)
    stored: dict[str, torch.Tensor] = {}
    for bucket in manifest.buckets:
        stored |= load_file(Path(uri).parent / bucket.file)
    assert same(stored, load_file(tmp_path / "checkpoints" / "models" / "step-000001" / "model.safetensors"))
    # A step that was done again may have other bits: engines have these, and the version stays what it was.
    other = {name: tensor + 1 for name, tensor in copied.weights.items()}
    assert publisher.publish(other, PolicyVersion("a", 1), store) == uri
    assert read_manifest(uri) == manifest
    # Of a broadcast nothing is stored but the manifest: it is that of what will be sent.
    broadcast = f"collective://127.0.0.1:29600{tmp_path}/broadcast"
    publisher.publish(copied.weights, PolicyVersion("a", 1), broadcast)
    publisher.publish(other, PolicyVersion("a", 1), broadcast)
    found = WeightStore(broadcast).newest("a")
    assert found is not None and found.digest != manifest.digest


def test_a_model_of_two_bytes_is_published_and_kept_in_two(tmp_path: Path) -> None:
    ranks = trainer(tmp_path, model=half_model(tmp_path / "half"), learning_rate=1e-5)
    train(ranks, tmp_path, 1)
    ranks.save(model=True)
    model = load_file(tmp_path / "checkpoints" / "models" / "step-000001" / "model.safetensors")
    assert {tensor.dtype for tensor in model.values()} == {torch.bfloat16}
    masters = {tensor.dtype for tensor in ranks.learner.policy.weights().values()}
    assert masters == {torch.float32}


def test_an_adapter_is_trained_published_and_merged(tmp_path: Path) -> None:
    ranks = trainer(tmp_path, lora_rank=4, lora_alpha=8.0, kl_coefficient=0.1)
    report = ranks.train(stored_batch(tmp_path, 1), PolicyVersion("a", 1))
    assert report.metrics["kl"] == pytest.approx(0.0, abs=1e-9), "before the first step it is the model itself"
    train(ranks, tmp_path, 2)
    copied = ranks.weights_of(PolicyVersion("a", 2))
    assert isinstance(copied, CopiedWeights)
    publisher = ranks.learner.publisher
    uri = publisher.publish(copied.weights, PolicyVersion("a", 2), str(tmp_path / "weights"))
    manifest = WeightStore(str(tmp_path / "weights")).newest("a")
    assert manifest is not None and manifest.adapter is not None
    assert (manifest.kind, manifest.adapter.rank, manifest.adapter.scale) == ("adapter", 4, 2.0)
    base = load_file(AGENT / "model.safetensors")
    assert manifest.nbytes < sum(tensor.nbytes for tensor in base.values()) / 4
    assert all("lora_" in tensor.name for tensor in manifest.tensors)
    assert Path(uri).exists()
    ranks.export(tmp_path / "merged")
    # A broadcast sends whole weights.
    broadcast = f"collective://127.0.0.1:29600{tmp_path}/broadcast"
    publisher.publish(copied.weights, PolicyVersion("a", 2), broadcast)
    whole = WeightStore(broadcast).newest("a")
    assert whole is not None and whole.kind == "full"
    assert {tensor.name for tensor in whole.tensors} == set(base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(40)[None]
    model = ranks.learner.policy.model
    model.eval()
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
        plain = AutoModelForCausalLM.from_pretrained(AGENT)(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (plain - expected).abs().max() > 1e-3
    with pytest.raises(BadInput, match="exists"):
        ranks.export(tmp_path / "merged")
    # transformers finds the base through the adapter's own configuration.
    ranks.save(model=True)
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "models" / "step-000002")
    torch.testing.assert_close(adapted(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
