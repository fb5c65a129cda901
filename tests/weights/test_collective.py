"""Stores of broadcasts: their URIs, and manifests that are those of a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds.weight_builders import tensors_of

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.weights.collective import CollectiveUri, is_collective, store_uri
from heddle_dask.weights.model_directory import model_facts
from heddle_dask.weights.store import WeightStore

ONE = PolicyVersion("a", 1)


@pytest.mark.parametrize(
    ("uri", "host", "port", "path"),
    [
        ("collective://10.0.0.7:29600", "10.0.0.7", 29600, ""),
        ("collective://node7:29600/runs/a#b?c/weights", "node7", 29600, "/runs/a#b?c/weights"),
        ("collective://[fd00::7]:29600/w", "fd00::7", 29600, "/w"),
    ],
)
def test_a_uri_is_read_as_it_is_written(uri: str, host: str, port: int, path: str) -> None:
    assert is_collective(uri)
    found = CollectiveUri.parse(uri)
    assert (found.host, found.port, found.path, str(found)) == (host, port, path, uri)


@pytest.mark.parametrize(
    "uri",
    [
        "collective://",
        "collective:///weights",
        "collective://host",
        "collective://host:0",
        "collective://host:http",
        "collective://host:70000",
        "collective://user@host:29600",
        "collective://0.0.0.0:29600",
        "collective://[::]:29600",
    ],
)
def test_a_uri_without_an_address_to_connect_to_is_refused_in_one_line(uri: str) -> None:
    with pytest.raises(BadInput) as refused:
        CollectiveUri.parse(uri)
    assert uri in str(refused.value) and "\n" not in str(refused.value)


def test_manifests_lie_in_the_training_unless_the_uri_says_where(tmp_path: Path) -> None:
    assert store_uri(None, tmp_path / "weights") == str(tmp_path / "weights")
    assert store_uri("memory://w", tmp_path / "weights") == "memory://w"
    assert store_uri("collective://h:1", tmp_path / "weights") == f"collective://h:1{tmp_path}/weights"
    assert store_uri("collective://h:1/there", tmp_path / "weights") == "collective://h:1/there"


def test_a_broadcast_has_the_manifest_of_a_directory_which_may_take_over(tmp_path: Path, model_dir: str) -> None:
    place = str(tmp_path / "weights")
    broadcast, directory = WeightStore(f"collective://h:1{place}"), WeightStore(place)
    facts = model_facts(model_dir)
    uri = broadcast.write_manifest(ONE, tensors_of(model_dir), facts)
    assert uri == f"collective://h:1{place}/a/00000001/manifest.json" == broadcast.manifest_uri(ONE)
    assert broadcast.uri == f"collective://h:1{place}" and broadcast.versions("a") == (ONE,)
    assert not list(tmp_path.rglob("*.safetensors"))
    manifest = broadcast.newest("a")
    directory.write(ONE, tensors_of(model_dir), facts)
    assert directory.newest("a") == manifest is not None
    assert {file.name for file in tmp_path.rglob("*.safetensors")} == {b.file for b in manifest.buckets}
    assert broadcast.write_manifest(ONE, tensors_of(model_dir), facts) == uri, "the same again changes nothing"
    with pytest.raises(BadInput, match="the trainer of `heddle train` broadcasts them"):
        broadcast.write(ONE, tensors_of(model_dir), facts)
