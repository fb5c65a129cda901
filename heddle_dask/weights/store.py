"""The weight store: a directory, or any place that fsspec reaches, to which a trainer publishes versions.

A version is a directory ``LINEAGE/NUMBER`` with safetensors files (buckets) and a manifest. The manifest is written
last, in one piece, and carries its own digest; without a whole manifest there is no version. Names of buckets contain
the digest of their content, so that writing a version again never changes a file that a reader may be reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final

import fsspec
from fsspec.implementations.local import LocalFileSystem

from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.weights.collective import CollectiveUri, is_collective
from heddle_dask.weights.manifest import (
    MANIFEST_NAME,
    AdapterFacts,
    ModelFacts,
    WeightBucket,
    WeightKind,
    WeightManifest,
    WeightsRefused,
    check_version,
    is_lineage,
)
from heddle_dask.weights.tensor_files import RawTensor, file_parts

BUCKET_BYTES: Final = 1_000_000_000
"""A bucket is closed before it grows beyond this; a larger tensor has a bucket of its own."""

_MOST_MANIFEST_BYTES: Final = 256 << 20


class WeightStore:
    """Versions of weights at a URI: a path, ``file://…``, ``memory://…``, ``s3://…`` or another URL of fsspec.

    Credentials and other options come from fsspec's own configuration (``FSSPEC_S3_KEY``, ``~/.config/fsspec``). The
    store of a broadcast (``collective://HOST:PORT/DIRECTORY``) keeps manifests without their buckets.

    Raises
    ------
    BadInput
        fsspec does not know the URI, or lacks the package for it.
    """

    def __init__(self, uri: str) -> None:
        self._collective = CollectiveUri.parse(uri) if is_collective(uri) else None
        self._files, self._root = open_files(uri if self._collective is None else self._collective.path)

    @property
    def is_broadcast(self) -> bool:
        """Whether only manifests are kept here, and the trainer sends the weights."""
        return self._collective is not None

    @property
    def uri(self) -> str:
        """The store's URI; that of a local directory is an absolute path."""
        return self._uri_of(self._root)

    def check_writable(self) -> None:
        """Raise `BadInput` when nothing can be written here."""
        name = f"{self._root}/.writable-{secrets.token_hex(8)}"
        try:
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(name, b"")
            self._files.rm_file(name)
        except Exception as error:  # every implementation of fsspec raises errors of its own
            raise BadInput(f"the weight store {self.uri} cannot be written: {_one_line(error)}") from None

    def write(
        self,
        version: PolicyVersion,
        tensors: Iterable[RawTensor],
        model: ModelFacts,
        *,
        adapter: AdapterFacts | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> str:
        """Publish a version; returns the URI of its manifest. Memory: two buckets, hashed and written in turn.

        Publishing the same weights again changes nothing.

        Parameters
        ----------
        tensors
            Taken one after another, so that a generator can produce them.
        adapter
            The tensors are those of a LoRA adapter, named as PEFT stores them.

        Raises
        ------
        BadInput
            The version exists with other weights, or the store cannot be written.
        """
        writer = BucketWriter(self, version, model, adapter=adapter, bucket_bytes=bucket_bytes)
        for tensor in tensors:
            writer.add(tensor)
        return writer.publish()

    def write_manifest(self, version: PolicyVersion, tensors: Iterable[RawTensor], model: ModelFacts) -> str:
        """Publish a version that the caller broadcasts: see `write`, but buckets are only measured.

        Here it replaces a manifest: a trainer that did a step again may have other bits than the one that died.
        """
        writer = BucketWriter(self, version, model, only_manifest=True)
        for tensor in tensors:
            writer.add(tensor)
        return writer.publish()

    def manifest_uri(self, version: PolicyVersion) -> str:
        return self._uri_of(self._manifest_path(version))

    def manifest(self, version: PolicyVersion) -> WeightManifest | None:
        """The manifest of a version; None: it is not in the store as a whole."""
        try:
            manifest = WeightManifest.from_json(_text_of(self._files, self._manifest_path(version)))
        except (FileNotFoundError, NotADirectoryError, WeightsRefused):
            return None
        return manifest if manifest.version == version else None

    def lineages(self) -> tuple[str, ...]:
        """Names of the lines of training that have published here, sorted."""
        self._files.invalidate_cache()
        try:
            entries = self._files.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        found = (str(e["name"]).rstrip("/").rsplit("/", 1)[-1] for e in entries if e["type"] == "directory")
        return tuple(sorted(name for name in found if is_lineage(name)))

    def versions(self, lineage: str) -> tuple[PolicyVersion, ...]:
        """The complete versions of a lineage, oldest first."""
        numbers = sorted(self._numbers(lineage))
        found = (PolicyVersion(lineage, number) for number in numbers)
        return tuple(version for version in found if self.manifest(version) is not None)

    def newest(self, lineage: str) -> WeightManifest | None:
        for number in sorted(self._numbers(lineage), reverse=True):
            manifest = self.manifest(PolicyVersion(lineage, number))
            if manifest is not None:
                return manifest
        return None

    def prune(self, lineage: str, keep: int, in_use: Collection[PolicyVersion] = ()) -> tuple[PolicyVersion, ...]:
        """Remove all versions but the newest `keep` and those `in_use`; returns what was removed.

        Unfinished versions older than the newest complete one go as well. A manifest goes before its buckets: a reader
        finds a version that it can check, or none.
        """
        if keep < 1:
            raise BadInput(f"keep {keep} versions of weights: use at least 1")
        complete = self.versions(lineage)
        kept = {*complete[-keep:], *in_use}
        removed = []
        for number in sorted(self._numbers(lineage)):
            version = PolicyVersion(lineage, number)
            if version in kept or not complete or number > complete[-1].number:
                continue
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._manifest_path(version))
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._directory(version), recursive=True)
            removed.append(version)
        return tuple(removed)

    def remove(self, lineage: str) -> None:
        """Remove all versions of a line of training that is given up.

        Raises
        ------
        BadInput
            The store cannot be written.
        """
        check_version(PolicyVersion(lineage, 0))
        try:
            self._files.rm(f"{self._root}/{lineage}", recursive=True)
        except FileNotFoundError:
            return
        except Exception as error:  # every implementation of fsspec raises errors of its own
            raise BadInput(f"weights {lineage} cannot be removed from {self.uri}: {_one_line(error)}") from None

    # ------------------------------------------------------------------ inside

    def _uri_of(self, path: str) -> str:
        if self._collective is not None:
            return str(replace(self._collective, path=path))
        return path if isinstance(self._files, LocalFileSystem) else str(self._files.unstrip_protocol(path))

    def _directory(self, version: PolicyVersion) -> str:
        check_version(version)
        return f"{self._root}/{version.lineage}/{version.number:08d}"

    def _manifest_path(self, version: PolicyVersion) -> str:
        return f"{self._directory(version)}/{MANIFEST_NAME}"

    def _numbers(self, lineage: str) -> list[int]:
        check_version(PolicyVersion(lineage, 0))
        self._files.invalidate_cache()  # another process has written
        try:
            paths = self._files.ls(f"{self._root}/{lineage}", detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths]
        return [int(name) for name in names if name.isdecimal()]

    def _put(self, path: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a file that has its name only when it is whole."""
        self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        if not isinstance(self._files, LocalFileSystem):
            # Object stores, and fsspec's own memory, show a file when it is closed.
            with self._files.open(path, "wb") as file:
                for part in parts:
                    file.write(part)
            return
        partial = f"{path}.{secrets.token_hex(4)}.partial"
        try:
            with open(partial, "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise


class BucketWriter:
    """Writes one version, tensor by tensor; nobody sees it before `publish`.

    Parameters
    ----------
    store, version, model, adapter, bucket_bytes
        See `WeightStore.write`.
    only_manifest
        Buckets are not written: for stores of broadcasts, and only for them.
    """

    def __init__(
        self,
        store: WeightStore,
        version: PolicyVersion,
        model: ModelFacts,
        *,
        adapter: AdapterFacts | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        only_manifest: bool = False,
    ) -> None:
        if store.is_broadcast and not only_manifest:
            raise BadInput(
                f"weights are not stored at {store.uri}: the trainer of `heddle train` broadcasts them; give a "
                "directory or a URL"
            )
        if bucket_bytes < 1:
            raise BadInput(f"buckets of {bucket_bytes} bytes: use at least 1")
        self._store = store
        self._version = version
        self._model = model
        self._adapter = adapter
        self._bucket_bytes = bucket_bytes
        self._only_manifest = only_manifest
        self._directory = store._directory(version)
        self._open: list[RawTensor] = []
        self._names: set[str] = set()
        self._buckets: list[WeightBucket] = []
        # A bucket is written while the next one is filled and hashed.
        self._writer = ThreadPoolExecutor(1)
        self._written: Future[None] | None = None

    def add(self, tensor: RawTensor) -> None:
        """Take one more tensor. Its data must not change before `publish` returns.

        Raises
        ------
        ValueError
            A tensor of that name was added before.
        BadInput
            The store cannot be written.
        """
        if tensor.name in self._names:
            raise ValueError(f"tensor {tensor.name} is published twice")
        self._names.add(tensor.name)
        if self._open and sum(one.nbytes for one in self._open) + tensor.nbytes > self._bucket_bytes:
            self._close_bucket()
        self._open.append(tensor)

    def publish(self) -> str:
        """Write what is left, and the manifest; returns its URI.

        Raises
        ------
        BadInput
            The version exists with other weights, or the store cannot be written.
        """
        if self._open:
            self._close_bucket()
        self._wait_for_bucket()
        self._writer.shutdown()
        kind: WeightKind = "full" if self._adapter is None else "adapter"
        manifest = WeightManifest(self._version, self._model, tuple(self._buckets), kind, self._adapter)
        uri = self._store.manifest_uri(self._version)
        known = self._store.manifest(self._version)
        is_same = known is not None and known.digest == manifest.digest
        if known is not None and not is_same and not self._only_manifest:
            raise BadInput(f"{uri} holds other weights of version {self._version}: begin a new lineage")
        if not is_same:
            self._put(MANIFEST_NAME, [manifest.to_json().encode()])
        return uri

    def _close_bucket(self) -> None:
        parts = file_parts(self._open)
        hasher = hashlib.blake2b(digest_size=32)
        for part in parts:
            hasher.update(part)
        digest = hasher.hexdigest()
        nbytes = sum(len(part) for part in parts)
        name = f"bucket-{len(self._buckets):05d}-{digest[:12]}.safetensors"
        self._wait_for_bucket()
        if not self._only_manifest and not self._has(name, nbytes):
            self._written = self._writer.submit(self._put, name, parts)
        facts = tuple(tensor.facts for tensor in self._open)
        self._buckets.append(WeightBucket(name, nbytes, digest, facts))
        self._open = []

    def _wait_for_bucket(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _has(self, name: str, nbytes: int) -> bool:
        try:
            return bool(self._store._files.size(f"{self._directory}/{name}") == nbytes)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _put(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        try:
            self._store._put(f"{self._directory}/{name}", parts)
        except Exception as error:  # every implementation of fsspec raises errors of its own
            raise BadInput(
                f"version {self._version} cannot be written to the weight store {self._store.uri}: {_one_line(error)}"
            ) from error


def open_files(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URI, and the path in it.

    Raises
    ------
    BadInput
        fsspec does not know the URI, or lacks the package for it.
    """
    if not uri:
        raise BadInput("the weight store is an empty text: give a directory or a URL")
    try:
        files, path = fsspec.core.url_to_fs(os.path.expanduser(uri))
    except (ValueError, ImportError) as error:
        raise BadInput(f"the weight store {uri} cannot be opened: {_one_line(error)}") from None
    return files, str(path).rstrip("/") or "/"


def read_manifest(uri: str) -> WeightManifest:
    """The manifest at a URI.

    Raises
    ------
    WeightsRefused
        There is none, or it is not whole.
    """
    try:
        files, path = open_files(uri)
        text = _text_of(files, path)
    except WeightsRefused:
        raise
    except Exception as error:  # every implementation of fsspec raises errors of its own
        raise WeightsRefused(f"{uri} cannot be read: {_one_line(error)}") from None
    return WeightManifest.from_json(text)


def _text_of(files: fsspec.AbstractFileSystem, path: str) -> bytes:
    """The text of a manifest; a FIFO would hang, and a device has no end."""
    is_here = isinstance(files, LocalFileSystem) and files.exists(path)
    if is_here and (not files.isfile(path) or files.size(path) > _MOST_MANIFEST_BYTES):
        raise WeightsRefused(f"{path} is no regular file of at most {_MOST_MANIFEST_BYTES:,} bytes")
    content: bytes = files.cat_file(path)
    return content


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
