"""Published weights on a node's own disk: fetched once for all engines of the node, verified, ready to be loaded.

A version becomes a model directory ``LINEAGE-NUMBER-DIGEST``: its weights, and configuration and tokenizer of the model
that the engines were started with, in a `NodeCache`. An interrupted fetch goes on from the partial directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from heddle_dask.core.errors import HeddleError
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.engines.node_cache import HeldDirectory, NodeCache
from heddle_dask.weights.adapters import RunningModel, check_fits, check_order, merged
from heddle_dask.weights.manifest import AdapterFacts, WeightBucket, WeightManifest, WeightsRefused
from heddle_dask.weights.model_directory import model_facts, model_tensors, weight_files, weights_digest
from heddle_dask.weights.store import BUCKET_BYTES, open_files, read_manifest
from heddle_dask.weights.tensor_files import RawTensor, file_parts, read_header, read_tensors

_CHUNK_BYTES = 16 << 20
# A store that does not answer is asked so often, with these pauses.
_RETRY_PAUSES_S = (0.5, 2.0)
# A disk that is filled to the last byte stops everybody who uses it.
_SPARE_BYTES = 1 << 28
_INDEX = "model.safetensors.index.json"
# Size and digest of each weight file of a complete version, as they were verified or merged.
_VERIFIED = "verified.json"


class FetchStopped(HeddleError):
    """A newer version is wanted, or the engine is gone."""


@dataclass(slots=True)
class NodeWeights:
    """A model directory to load from; `release` it when no engine needs it any more."""

    version: PolicyVersion
    nbytes: int
    _held: HeldDirectory = field(repr=False)

    @property
    def path(self) -> Path:
        return self._held.path

    def release(self) -> None:
        self._held.release()


class NodeWeightsDirectory:
    """The versions of one node, for engines of one model.

    Parameters
    ----------
    directory
        On the node's own disk; made with mode 0700 when absent.
    model
        The model directory that the engines were started with.
    dtype
        The type in which they run it, as `EngineSpec.dtype`.
    link
        Buckets of a store on the same file system are linked and not copied.
    """

    def __init__(self, directory: Path, model: str, dtype: str = "auto", *, link: bool = True) -> None:
        self._directory = directory
        self._cache = NodeCache(directory)
        self._model = Path(model)
        self._dtype = dtype
        self._link = link

    @cached_property
    def _running(self) -> RunningModel:
        tensors = {tensor.name: tensor for tensor in model_tensors(self._model)}
        return RunningModel(model_facts(self._model), tensors, self._dtype)

    @cached_property
    def _base_digest(self) -> str:
        return weights_digest(self._model)

    def fetch(
        self,
        uri: str,
        version: PolicyVersion,
        current: PolicyVersion,
        stop: threading.Event,
        *,
        recheck: bool = False,
    ) -> NodeWeights:
        """Bring a version here and verify it; blocks.

        Parameters
        ----------
        version, current
            What is asked for, and what the engine has.
        stop
            Set from another thread to give up; what is here by then is kept for the next attempt.
        recheck
            Compare digests, and not only sizes, of what is here already: an engine could not load it.

        Raises
        ------
        WeightsRefused
            The weights are incomplete, corrupt, older, or not those of this model or of `version`; or the store or the
            disk failed. One line.
        FetchStopped
        BadInput
            The model or the directory cannot be used.
        """
        self._check_model()
        manifest = read_manifest(uri)
        self.check(manifest, version, current)
        if manifest.adapter is not None and manifest.adapter.base_digest != self._base_digest:
            raise WeightsRefused(f"adapter {version} was trained on other weights than those of {self._model}")
        try:
            held = self._cache.hold(
                f"{version.lineage}-{version.number:08d}-{manifest.digest[:12]}",
                lambda path: _is_whole(path, recheck, stop),
                lambda partial: self._bring(uri, manifest, partial, stop),
                stop,
            )
        except OSError as error:
            raise WeightsRefused(
                f"weights {version} cannot be kept in {self._directory}: {error.strerror or error}"
            ) from error
        return NodeWeights(version, manifest.nbytes, held)

    def check(self, manifest: WeightManifest, version: PolicyVersion, current: PolicyVersion) -> None:
        """Refuse a version by its manifest.

        Raises
        ------
        WeightsRefused
            It is not the one that is asked for, not newer than `current`, or not of this model.
        """
        self._check_model()
        check_order(manifest, version, current)
        check_fits(manifest, self._running)

    def prune(self, newest: PolicyVersion) -> None:
        """Remove the versions before `newest`, and those of other lineages, that no engine of this node uses."""
        for name, path in self._cache.directories():
            lineage, number, _ = name.rsplit("-", 2)
            if lineage != newest.lineage or int(number) < newest.number:
                with contextlib.suppress(OSError):  # the next one removes it
                    self._cache.remove_unused(name, path)

    def clear(self) -> None:
        """Remove all versions that no engine of this node uses."""
        self.prune(PolicyVersion())
        with contextlib.suppress(OSError):
            self._directory.rmdir()  # only when it is empty

    # ------------------------------------------------------------------ inside

    def _check_model(self) -> None:
        if not self._model.is_dir():
            raise WeightsRefused(f"weights are compared with a model directory, and {self._model} is none")

    def _bring(self, uri: str, manifest: WeightManifest, partial: Path, stop: threading.Event) -> None:
        self._check_room(manifest, partial)
        files, manifest_path = open_files(uri)
        source = manifest_path.rpartition("/")[0]
        for bucket in manifest.buckets:
            _fetch_bucket(files, f"{source}/{bucket.file}", bucket, partial, stop, self._link)
        self._complete(manifest, partial, stop)

    def _check_room(self, manifest: WeightManifest, partial: Path) -> None:
        needed = manifest.nbytes
        if manifest.kind == "adapter":
            needed += sum(file.stat().st_size for file in weight_files(self._model))
        there = sum(file.stat().st_size for file in partial.iterdir())
        free = shutil.disk_usage(self._directory).free
        if free + there < needed + _SPARE_BYTES:
            raise WeightsRefused(
                f"weights {manifest.version} need {needed >> 20} MiB in {self._directory}, which has {free >> 20} MiB "
                "free"
            )

    def _complete(self, manifest: WeightManifest, partial: Path, stop: threading.Event) -> None:
        if manifest.adapter is None:
            digests = {bucket.file: bucket.digest for bucket in manifest.buckets}
        else:
            digests = self._merge(manifest, manifest.adapter, partial, stop)
        files = sorted(partial.glob("*.safetensors"))
        index = {one.facts.name: file.name for file in files for one in read_header(file)}
        size = sum(file.stat().st_size for file in files)
        (partial / _INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}))
        for file in self._model.iterdir():
            if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json", ".bin")):
                shutil.copyfile(file, partial / file.name)
        sizes = {file.name: file.stat().st_size for file in files}
        verified = {name: [nbytes, digests[name]] for name, nbytes in sizes.items()}
        (partial / _VERIFIED).write_text(json.dumps(verified))

    def _merge(
        self, manifest: WeightManifest, facts: AdapterFacts, partial: Path, stop: threading.Event
    ) -> dict[str, str]:
        """Replace the fetched matrices by whole weights; returns the digests of their files."""
        fetched = [partial / bucket.file for bucket in manifest.buckets]
        adapter = {tensor.name: tensor for file in fetched for tensor in read_tensors(file)}
        base = (tensor for file in weight_files(self._model) for tensor in read_tensors(file))
        digests = {}
        for number, group in enumerate(_grouped(merged(base, adapter, facts), stop)):
            hasher = hashlib.blake2b(digest_size=32)
            name = f"merged-{number:05d}.safetensors"
            with (partial / name).open("wb") as writing:
                for part in file_parts(group):
                    hasher.update(part)
                    writing.write(part)
            digests[name] = hasher.hexdigest()
        for file in fetched:
            file.unlink()
        return digests


def _is_whole(path: Path, recheck: bool, stop: threading.Event) -> bool:
    """Whether a directory that has its name still has what it had then, by sizes or by digests too."""
    try:
        verified = json.loads((path / _VERIFIED).read_text())
        return all(
            (path / name).stat().st_size == nbytes and (not recheck or _digest_of(path / name, stop) == digest)
            for name, (nbytes, digest) in verified.items()
        )
    except (FileNotFoundError, ValueError):
        return False


def _grouped(tensors: Iterable[RawTensor], stop: threading.Event) -> Iterable[list[RawTensor]]:
    group: list[RawTensor] = []
    for tensor in tensors:
        if stop.is_set():
            raise FetchStopped("the fetch was stopped")
        if group and sum(one.nbytes for one in group) + tensor.nbytes > BUCKET_BYTES:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _fetch_bucket(
    files: fsspec.AbstractFileSystem,
    source: str,
    bucket: WeightBucket,
    partial: Path,
    stop: threading.Event,
    link: bool,
) -> None:
    """Have one bucket in the directory, verified."""
    target = partial / bucket.file
    if target.exists() and _digest_of(target, stop) == bucket.digest:
        return  # from an attempt before
    target.unlink(missing_ok=True)
    digest = (link and _linked(files, source, target, stop)) or _copied(files, source, target, stop)
    if digest != bucket.digest or target.stat().st_size != bucket.nbytes:
        target.unlink(missing_ok=True)
        raise WeightsRefused(f"bucket {source} is corrupt: its digest is not that of the manifest")
    if {one.facts for one in read_header(target)} != set(bucket.tensors):
        target.unlink(missing_ok=True)
        raise WeightsRefused(f"bucket {source} has other tensors than the manifest says")


def _linked(files: fsspec.AbstractFileSystem, source: str, target: Path, stop: threading.Event) -> str:
    """The digest of the bucket, linked from a store on the same disk; empty: it is elsewhere."""
    if not isinstance(files, LocalFileSystem):
        return ""
    try:
        os.link(source, target)
    except OSError:
        return ""  # another file system, or no such file, which a copy reports
    return _digest_of(target, stop)


def _copied(files: fsspec.AbstractFileSystem, source: str, target: Path, stop: threading.Event) -> str:
    """The digest of the bucket, copied from the store."""
    for pause_s in (*_RETRY_PAUSES_S, None):
        try:
            with files.open(source, "rb") as reading, target.open("wb") as writing:
                return _hashed(reading, writing, stop)
        except FetchStopped:
            target.unlink(missing_ok=True)
            raise
        except FileNotFoundError:
            target.unlink(missing_ok=True)
            raise WeightsRefused(f"bucket {source} is missing from the store") from None
        except Exception as error:  # every implementation of fsspec raises errors of its own
            if pause_s is None:
                told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise WeightsRefused(f"bucket {source} cannot be read: {told}") from None
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def _digest_of(path: Path, stop: threading.Event) -> str:
    with path.open("rb") as reading:
        return _hashed(reading, None, stop)


def _hashed(reading: IO[bytes], writing: IO[bytes] | None, stop: threading.Event) -> str:
    hasher = hashlib.blake2b(digest_size=32)
    while chunk := reading.read(_CHUNK_BYTES):
        if stop.is_set():
            raise FetchStopped("the fetch was stopped")
        hasher.update(chunk)
        if writing is not None:
            writing.write(chunk)
    return hasher.hexdigest()
