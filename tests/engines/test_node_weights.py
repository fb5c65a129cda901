"""Published weights on a node: fetched once, resumed, verified, merged, removed."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from worlds.weight_builders import perturbed, tensors_of

from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines import node_weights
from heddle_dask.engines.file_lock import FileLock, LockStopped
from heddle_dask.engines.node_weights import FetchStopped, NodeWeightsDirectory
from heddle_dask.weights.adapters import to_float32
from heddle_dask.weights.manifest import AdapterFacts, WeightsRefused
from heddle_dask.weights.model_directory import model_facts, model_tensors, weights_digest
from heddle_dask.weights.store import WeightStore
from heddle_dask.weights.tensor_files import RawTensor

RUN = PolicyVersion("run", 0)
GO_ON = threading.Event()


def version(number: int) -> PolicyVersion:
    return PolicyVersion("run", number)


@pytest.fixture
def store() -> WeightStore:
    return WeightStore(f"memory://node-weights-{os.urandom(6).hex()}")


def publish(store: WeightStore, model_dir: str, number: int = 1) -> str:
    return store.write(version(number), perturbed(model_dir, number), model_facts(model_dir), bucket_bytes=900_000)


def test_a_fetched_version_is_a_model_directory(tmp_path: Path, store: WeightStore, model_dir: str) -> None:
    uri = publish(store, model_dir)
    weights = NodeWeightsDirectory(tmp_path / "node", model_dir).fetch(uri, version(1), RUN, GO_ON)
    ours = {one.name: to_float32(one) for one in tensors_of(weights.path)}
    theirs = {one.name: to_float32(one) for one in perturbed(model_dir, 1)}
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "node").stat().st_mode & 0o777 == 0o700
    pytest.importorskip("torch")
    model = AutoModelForCausalLM.from_pretrained(weights.path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert np.array_equal(model.get_parameter(name).detach().numpy(), theirs[name])
    assert AutoTokenizer.from_pretrained(weights.path).vocab_size > 0


def test_engines_of_a_node_fetch_once(
    tmp_path: Path, store: WeightStore, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, fetched, fetch = publish(store, model_dir), [], node_weights._fetch_bucket

    def counted(files: Any, source: str, *rest: Any) -> None:
        fetched.append(source)
        fetch(files, source, *rest)

    monkeypatch.setattr(node_weights, "_fetch_bucket", counted)
    with ThreadPoolExecutor(4) as threads:
        directories = [NodeWeightsDirectory(tmp_path / "node", model_dir) for _ in range(4)]
        found = list(threads.map(lambda each: each.fetch(uri, version(1), RUN, GO_ON), directories))
    assert len({each.path for each in found}) == 1
    assert len(fetched) == len(set(fetched)) == 4


def test_an_interrupted_fetch_goes_on_where_it_was(
    tmp_path: Path, store: WeightStore, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, stop, copied, copy = publish(store, model_dir), threading.Event(), [], node_weights._copied

    def counted(files: Any, source: str, target: Path, until: threading.Event) -> str:
        if len(copied) == 2:
            stop.set()
        copied.append(source)
        return copy(files, source, target, until)

    monkeypatch.setattr(node_weights, "_copied", counted)
    directory = NodeWeightsDirectory(tmp_path / "node", model_dir)
    with pytest.raises(FetchStopped):
        directory.fetch(uri, version(1), RUN, stop)
    (partial,) = (tmp_path / "node").glob("*.partial")
    assert len(list(partial.glob("*.safetensors"))) == 2
    weights = directory.fetch(uri, version(1), RUN, GO_ON)
    assert len(copied) == 5 and weights.path.is_dir() and not partial.exists()


def test_a_store_on_the_same_disk_is_linked(tmp_path: Path, model_dir: str) -> None:
    uri = publish(WeightStore(str(tmp_path / "store")), model_dir)
    weights = NodeWeightsDirectory(tmp_path / "node", model_dir).fetch(uri, version(1), RUN, GO_ON)
    assert {file.stat().st_nlink for file in weights.path.glob("*.safetensors")} == {2}


def test_what_changed_on_the_node_is_fetched_again(tmp_path: Path, store: WeightStore, model_dir: str) -> None:
    directory = NodeWeightsDirectory(tmp_path / "node", model_dir)
    uri = publish(store, model_dir)
    weights = directory.fetch(uri, version(1), RUN, GO_ON)
    weights.release()
    next(weights.path.glob("*.safetensors")).write_bytes(b"cut")
    again = directory.fetch(uri, version(1), RUN, GO_ON)
    assert len(list(tensors_of(again.path))) == len(model_tensors(model_dir))


@pytest.mark.parametrize("kind", ["full", "adapter"])
def test_damage_that_leaves_the_size_is_found_when_digests_are_compared(
    kind: str, tmp_path: Path, store: WeightStore, model_dir: str
) -> None:
    directory = NodeWeightsDirectory(tmp_path / "node", model_dir)
    if kind == "full":
        uri = publish(store, model_dir)
    else:
        facts = AdapterFacts(4, 0.25, weights_digest(model_dir))
        uri = store.write(version(1), adapter_of(model_dir), model_facts(model_dir), adapter=facts)
    weights = directory.fetch(uri, version(1), RUN, GO_ON)
    weights.release()
    file = next(weights.path.glob("*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    directory.fetch(uri, version(1), RUN, GO_ON).release()
    assert file.read_bytes() != content, "only sizes are compared, as reading all weights takes long"
    directory.fetch(uri, version(1), RUN, GO_ON, recheck=True)
    assert file.read_bytes() == content


def test_a_store_that_fails_is_asked_again(
    tmp_path: Path, store: WeightStore, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = publish(store, model_dir, 1), publish(store, model_dir, 2)
    opened, open_file = [], store._files.open

    def failing(path: str, mode: str = "rb") -> Any:
        opened.append(path)
        if len(opened) % 3:
            raise ConnectionError("reset")
        return open_file(path, mode)

    monkeypatch.setattr(store._files, "open", failing)
    monkeypatch.setattr(node_weights, "_RETRY_PAUSES_S", (0.0, 0.0))
    directory = NodeWeightsDirectory(tmp_path / "node", model_dir)
    assert directory.fetch(first, version(1), RUN, GO_ON).path.is_dir()
    monkeypatch.setattr(node_weights, "_RETRY_PAUSES_S", (0.0,))
    with pytest.raises(WeightsRefused, match="cannot be read: ConnectionError: reset"):
        directory.fetch(second, version(2), RUN, GO_ON)


def test_a_bucket_with_other_tensors_than_the_manifest_says_is_refused(
    tmp_path: Path, store: WeightStore, model_dir: str
) -> None:
    uri = publish(store, model_dir)
    manifest = store.newest("run")
    assert manifest is not None
    first, second, *others = manifest.buckets
    swapped = (replace(first, tensors=second.tensors), replace(second, tensors=first.tensors), *others)
    store._files.pipe_file(uri, replace(manifest, buckets=swapped).to_json().encode())
    with pytest.raises(WeightsRefused, match="other tensors than the manifest says"):
        NodeWeightsDirectory(tmp_path / "node", model_dir).fetch(uri, version(1), RUN, GO_ON)


def adapter_of(model_dir: str, rank: int = 4) -> list[RawTensor]:
    random = np.random.default_rng(0)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"
    return [
        RawTensor.of(name.format("A"), random.normal(size=(rank, 128)).astype("f4")),
        RawTensor.of(name.format("B"), random.normal(size=(128, rank)).astype("f4")),
    ]


def test_an_adapter_is_merged_with_the_base_while_it_is_fetched(
    tmp_path: Path, store: WeightStore, model_dir: str
) -> None:
    down, up = adapter_of(model_dir)
    facts = AdapterFacts(4, 0.25, weights_digest(model_dir))
    uri = store.write(version(1), [down, up], model_facts(model_dir), adapter=facts)
    directory = NodeWeightsDirectory(tmp_path / "node", model_dir)
    weights = directory.fetch(uri, version(1), RUN, GO_ON)
    base = {one.name: to_float32(one) for one in tensors_of(model_dir)}
    found = {one.name: to_float32(one) for one in tensors_of(weights.path)}
    assert found.keys() == base.keys()
    changed = [name for name in base if not np.array_equal(base[name], found[name])]
    assert changed == ["model.layers.1.self_attn.q_proj.weight"]
    expected = base[changed[0]] + 0.25 * (to_float32(up) @ to_float32(down))
    assert found[changed[0]] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert directory.fetch(uri, version(1), RUN, GO_ON).path == weights.path
    index = json.loads((weights.path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in weights.path.glob("*.safetensors")}


def test_an_adapter_of_another_base_is_refused(tmp_path: Path, store: WeightStore, model_dir: str) -> None:
    uri = store.write(version(1), adapter_of(model_dir), model_facts(model_dir), adapter=AdapterFacts(4, 1.0, "other"))
    with pytest.raises(WeightsRefused, match="trained on other weights"):
        NodeWeightsDirectory(tmp_path / "node", model_dir).fetch(uri, version(1), RUN, GO_ON)


def test_versions_in_use_and_newer_ones_are_not_pruned(tmp_path: Path, store: WeightStore, model_dir: str) -> None:
    directory = NodeWeightsDirectory(tmp_path / "node", model_dir)
    held = {
        number: directory.fetch(publish(store, model_dir, number), version(number), RUN, GO_ON)
        for number in (1, 2, 3, 4)
    }
    for number in (2, 3, 4):
        held[number].release()
        held[number].release()
    directory.prune(version(3))
    left = sorted(each.name.rsplit("-", 1)[0] for each in (tmp_path / "node").iterdir() if each.is_dir())
    assert left == ["run-00000001", "run-00000003", "run-00000004"]
    directory.prune(PolicyVersion("resumed", 2))
    assert [each.name[:12] for each in (tmp_path / "node").iterdir() if each.is_dir()] == ["run-00000001"]
    assert NodeWeightsDirectory(tmp_path / "none", model_dir).prune(version(1)) is None


def test_a_node_without_room_says_so(
    tmp_path: Path, store: WeightStore, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_weights, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(WeightsRefused, match="MiB free"):
        NodeWeightsDirectory(tmp_path / "node", model_dir).fetch(publish(store, model_dir), version(1), RUN, GO_ON)
    with pytest.raises(WeightsRefused, match="is none"):
        NodeWeightsDirectory(tmp_path / "node", "some/model").fetch("memory://x", version(1), RUN, GO_ON)


def test_a_lock_is_waited_for_and_survives_the_removal_of_its_file(tmp_path: Path) -> None:
    path, stop = tmp_path / "x.lock", threading.Event()
    first, second = FileLock(path), FileLock(path)
    first.acquire(shared=False, stop=stop)
    with second.if_free() as held:
        assert not held
    waiting = threading.Thread(target=second.acquire, kwargs={"shared": True, "stop": stop})
    waiting.start()
    path.unlink()
    first.release()
    waiting.join(10)
    with FileLock(path).if_free() as held:
        assert not held
    stop.set()
    third = FileLock(path)
    with pytest.raises(LockStopped):
        third.acquire(shared=False, stop=stop)
    second.release()
    third.acquire(shared=False, stop=stop)
    third.release()
