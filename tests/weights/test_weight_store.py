"""Weight stores: whatever is cut, interrupted or removed, a reader finds whole versions only."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from worlds.weight_builders import model_with, perturbed, tensors_of

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.weights.manifest import AdapterFacts, ModelFacts, WeightManifest, WeightsRefused, json_digest
from heddle_dask.weights.model_directory import model_facts, model_tensors, weights_digest
from heddle_dask.weights.store import BucketWriter, WeightStore, open_files, read_manifest
from heddle_dask.weights.tensor_files import RawTensor, file_parts, read_header, read_tensors

FACTS = ModelFacts("shape", "words")
_names = itertools.count()


def fresh_store() -> WeightStore:
    return WeightStore(f"memory://store-{os.getpid()}-{next(_names)}")


def tensors(seed: int, sizes: Sequence[int] = (3, 0, 7)) -> list[RawTensor]:
    random = np.random.default_rng(seed)
    return [RawTensor.of(f"t{index}", random.normal(size=size)) for index, size in enumerate(sizes)]


def read_back(store: WeightStore, manifest: WeightManifest) -> dict[str, bytes]:
    """Every tensor of a version, all digests checked."""
    files, path = open_files(store.manifest_uri(manifest.version))
    found = {}
    for bucket in manifest.buckets:
        content = files.cat_file(f"{path.rpartition('/')[0]}/{bucket.file}")
        assert hashlib.blake2b(content, digest_size=32).hexdigest() == bucket.digest
        assert len(content) == bucket.nbytes
        (length,) = struct.unpack("<Q", content[:8])
        for name, entry in json.loads(content[8 : 8 + length]).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                found[name] = content[8 + length + start : 8 + length + stop]
    return found


def expected(written: Sequence[RawTensor]) -> dict[str, bytes]:
    return {one.name: one.data.tobytes() for one in written}


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    bucket_bytes=st.integers(1, 400),
    seed=st.integers(0, 9),
)
def test_any_cut_into_buckets_holds_the_same_tensors(sizes: list[int], bucket_bytes: int, seed: int) -> None:
    store, version = fresh_store(), PolicyVersion("run", seed)
    written = tensors(seed, sizes)
    uri = store.write(version, iter(written), FACTS, bucket_bytes=bucket_bytes)
    manifest = store.newest("run")
    assert manifest is not None and manifest == read_manifest(uri)
    assert read_back(store, manifest) == expected(written)
    assert [one.name for one in manifest.tensors] == [one.name for one in written]
    for bucket in manifest.buckets:
        data = sum(8 * int(np.prod(one.shape)) for one in bucket.tensors)
        assert data <= bucket_bytes or len(bucket.tensors) == 1
    assert WeightManifest.from_json(manifest.to_json()) == manifest


class Crash(BaseException):
    """The writer is killed."""


def crashing(store: WeightStore, after: int, torn: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let the store's file system die after that many changes, in the middle of the next one if it is torn."""
    files = store._files
    done = 0

    def counted(act: Callable[..., object], tear: Callable[..., object]) -> Callable[..., object]:
        def acting(*args: object, **kwargs: object) -> object:
            nonlocal done
            if done >= after:
                if torn:
                    tear(*args)
                raise Crash
            done += 1
            return act(*args, **kwargs)

        return acting

    put, remove, remove_all = store._put, files.rm_file, files.rm

    def half(path: str, parts: Sequence[bytes]) -> None:
        whole = b"".join(bytes(part) for part in parts)
        files.makedirs(path.rpartition("/")[0], exist_ok=True)
        files.pipe_file(path, whole[: len(whole) // 2])

    def some(path: str, *_: object) -> None:
        for each in sorted(files.find(path))[:1]:
            remove(each)

    monkeypatch.setattr(store, "_put", counted(put, half))
    monkeypatch.setattr(files, "rm_file", counted(remove, lambda *_: None))
    monkeypatch.setattr(files, "rm", counted(remove_all, some))
    return lambda: done


@pytest.mark.parametrize("torn", [False, True])
def test_a_writer_killed_anywhere_leaves_the_old_version_or_the_new_one(torn: bool) -> None:
    old, new = tensors(0), tensors(1)
    for after in itertools.count():
        store = fresh_store()
        store.write(PolicyVersion("run", 3), old, FACTS, bucket_bytes=30)
        with pytest.MonkeyPatch.context() as monkeypatch:
            crashing(store, after, torn, monkeypatch)
            try:
                store.write(PolicyVersion("run", 4), new, FACTS, bucket_bytes=30)
                store.prune("run", keep=1)
                ended = True
            except Crash:
                ended = False
        for version in store.versions("run"):
            manifest = store.manifest(version)
            assert manifest is not None
            assert read_back(store, manifest) == expected(old if version.number == 3 else new)
        newest = store.newest("run")
        assert newest is not None
        # The trainer comes back and publishes again.
        store.write(PolicyVersion("run", 4), new, FACTS, bucket_bytes=30)
        newest = store.newest("run")
        assert newest is not None and newest.version.number == 4
        assert read_back(store, newest) == expected(new)
        if ended:
            assert after > 3
            return


def test_a_version_is_never_replaced_by_other_weights() -> None:
    store, version = fresh_store(), PolicyVersion("run", 1)
    uri = store.write(version, tensors(0), FACTS)
    assert store.write(version, tensors(0), FACTS) == uri
    with pytest.raises(BadInput, match="begin a new lineage"):
        store.write(version, tensors(1), FACTS)
    manifest = store.manifest(version)
    assert manifest is not None and read_back(store, manifest) == expected(tensors(0))


@given(
    numbers=st.sets(st.integers(0, 20), min_size=1, max_size=8),
    keep=st.integers(1, 4),
    used=st.sets(st.integers(0, 20), max_size=3),
    unfinished=st.integers(0, 20),
)
def test_pruning_keeps_the_newest_and_those_in_use(
    numbers: set[int], keep: int, used: set[int], unfinished: int
) -> None:
    store = fresh_store()
    for number in sorted(numbers):
        store.write(PolicyVersion("run", number), tensors(number), FACTS)
    store.write(PolicyVersion("other", 0), tensors(0), FACTS)
    if unfinished not in numbers:
        BucketWriter(store, PolicyVersion("run", unfinished), FACTS, bucket_bytes=1)._put("bucket", [b"half"])
    removed = store.prune("run", keep, [PolicyVersion("run", number) for number in used])
    kept = set(sorted(numbers)[-keep:]) | (used & numbers)
    assert {version.number for version in store.versions("run")} == kept
    gone = numbers - kept
    if unfinished not in numbers and unfinished not in used and unfinished < max(numbers):
        gone = gone | {unfinished}
    assert {version.number for version in removed} == gone
    assert store.newest("other") is not None


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path))
    uri = store.write(PolicyVersion("run", 1), tensors(0), FACTS)
    text = Path(uri).read_text()
    for changed, match in (
        (text.replace('"version": 1', '"version": 2'), "own digest"),
        (text[: len(text) // 2], "cannot be read"),
        (text.replace("heddle-weights", "other"), "another format"),
        ("[]", "cannot be read"),
    ):
        Path(uri).write_text(changed)
        with pytest.raises(WeightsRefused, match=match):
            read_manifest(uri)
        assert store.newest("run") is None
    Path(uri).unlink()
    with pytest.raises(WeightsRefused, match="cannot be read"):
        read_manifest(uri)


@pytest.mark.parametrize("file", ["../bucket", "a/b", "", ".hidden"])
def test_a_manifest_names_no_path(file: str) -> None:
    store = fresh_store()
    store.write(PolicyVersion("run", 1), tensors(0), FACTS)
    manifest = store.newest("run")
    assert manifest is not None
    forged = replace(manifest, buckets=(replace(manifest.buckets[0], file=file),))
    with pytest.raises(WeightsRefused, match="names the file"):
        WeightManifest.from_json(forged.to_json())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"config_digest": 5}},
        {"model": []},
        {"buckets": [{"file": "f", "nbytes": math.inf, "digest": "", "tensors": []}]},
        {"buckets": [5]},
        {"kind": "adapter", "adapter": {"rank": "x", "scale": 1.0, "base_digest": ""}},
        {"version": "x"},
        {"version": None, "lineage": []},
    ],
)
def test_a_manifest_of_other_types_is_refused(changes: dict[str, object]) -> None:
    store = fresh_store()
    store.write(PolicyVersion("run", 1), tensors(0), FACTS)
    manifest = store.newest("run")
    assert manifest is not None
    body = {**json.loads(manifest.to_json()), **changes}
    del body["digest"]
    with pytest.raises(WeightsRefused, match="cannot be read"):
        WeightManifest.from_json(json.dumps({**body, "digest": json_digest(body)}))


def test_a_manifest_that_is_deep_or_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match="RecursionError"):
        WeightManifest.from_json("[" * 100_000)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("fifo", "zero"):
        with pytest.raises(WeightsRefused, match="no regular file"):
            read_manifest(str(tmp_path / name))


@pytest.mark.parametrize("lineage", ["", "a/b", "..", "a:b", "a b", "x" * 101])
def test_a_lineage_is_a_plain_name(lineage: str) -> None:
    with pytest.raises(BadInput, match="lineage"):
        fresh_store().write(PolicyVersion(lineage, 1), tensors(0), FACTS)


def test_a_store_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for uri, match in (("", "empty"), ("nothing-known://x", "cannot be opened")):
        with pytest.raises(BadInput, match=match):
            WeightStore(uri)
    blocked = WeightStore(str(tmp_path / "file" / "below"))
    with pytest.raises(BadInput, match="cannot be written"):
        blocked.check_writable()
    with pytest.raises(BadInput, match="cannot be written"):
        blocked.write(PolicyVersion("run", 1), tensors(0), FACTS)
    good = WeightStore(f"file://{tmp_path}/good")
    good.check_writable()
    assert good.uri == f"{tmp_path}/good" and list((tmp_path / "good").iterdir()) == []


def test_raw_tensors_are_checked() -> None:
    data = np.zeros(6, dtype=np.uint8)
    assert RawTensor("x", "BF16", (3,), data).nbytes == 6
    for dtype, shape in (("BF16", (4,)), ("F32", (3,)), ("X9", (6,))):
        with pytest.raises(ValueError, match="tensor x"):
            RawTensor("x", dtype, shape, data)
    with pytest.raises(ValueError, match="contiguous"):
        RawTensor("x", "U8", (3,), data[::2])
    writer = BucketWriter(fresh_store(), PolicyVersion("run", 1), FACTS)
    writer.add(RawTensor("x", "U8", (6,), data))
    with pytest.raises(ValueError, match="twice"):
        writer.add(RawTensor("x", "U8", (6,), data))


def test_files_are_read_by_safetensors_and_ours(tmp_path: Path, model_dir: str) -> None:
    store = WeightStore(str(tmp_path / "store"))
    uri = store.write(PolicyVersion("run", 1), tensors_of(model_dir), model_facts(model_dir), bucket_bytes=1_000_000)
    buckets = sorted(Path(uri).parent.glob("*.safetensors"))
    assert len(buckets) == 4
    read = {name: array for bucket in buckets for name, array in load_file(bucket).items()}
    shipped = load_file(f"{model_dir}/model.safetensors")
    assert read.keys() == shipped.keys()
    assert all(np.array_equal(read[name], shipped[name]) for name in shipped)
    assert {one.name for bucket in buckets for one in read_tensors(bucket)} == set(shipped)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    whole = b"".join(file_parts(tensors(0)))
    path = tmp_path / "x.safetensors"
    for length in (0, 4, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(WeightsRefused, match=r"x\.safetensors"):
            read_header(path)
    path.write_bytes(whole)
    assert len(read_header(path)) == 3


def test_the_digests_of_a_model_ignore_its_files_and_formats(tmp_path: Path, model_dir: str) -> None:
    same = model_with(tmp_path / "same", model_dir, list(tensors_of(model_dir)), "other-name.safetensors")
    other = model_with(tmp_path / "other", model_dir, perturbed(model_dir, 1))
    assert weights_digest(same) == weights_digest(model_dir) != weights_digest(other)
    assert model_facts(other) == model_facts(model_dir)
    assert set(model_tensors(other)) == set(model_tensors(model_dir))
    config = (same / "config.json").read_text()
    (same / "config.json").write_text(config.replace('"transformers_version": "5', '"transformers_version": "6'))
    assert model_facts(same) == model_facts(model_dir)
    (same / "config.json").write_text(config.replace('"hidden_size": 128', '"hidden_size": 129'))
    assert model_facts(same).config_digest != model_facts(model_dir).config_digest
    tokenizer = (same / "tokenizer.json").read_text()
    (same / "tokenizer.json").write_text(tokenizer.replace('"id": 256', '"id": 299', 1))
    assert model_facts(same).tokenizer_digest != model_facts(model_dir).tokenizer_digest
    (tmp_path / "empty").mkdir()
    for read in (model_facts, model_tensors, weights_digest):
        with pytest.raises(BadInput, match="model directory"):
            read(tmp_path / "empty")


def test_an_adapter_is_marked(tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path))
    facts = AdapterFacts(4, 0.5, "base")
    store.write(PolicyVersion("run", 1), tensors(0), FACTS, adapter=facts)
    manifest = store.newest("run")
    assert manifest is not None and manifest.kind == "adapter" and manifest.adapter == facts
