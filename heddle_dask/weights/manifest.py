"""What a version of weights consists of, written after all of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self

from heddle_dask.core.errors import BadInput, HeddleError
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.core.value_types import check_types

WeightKind = Literal["full", "adapter"]

FORMAT: Final = "heddle-weights"
FORMAT_VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"
_KINDS = ("full", "adapter")
_LINEAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class WeightsRefused(HeddleError):
    """Weights that an engine must not load: incomplete, corrupt, older, of another model or another run."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What weights must have in common with the model that they replace, besides names and shapes.

    Attributes
    ----------
    config_digest
        Digest of the keys of ``config.json`` that decide the model's shape.
    tokenizer_digest
        Digest of the vocabulary; empty: there is no tokenizer.
    """

    config_digest: str
    tokenizer_digest: str = ""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor.

    Attributes
    ----------
    dtype
        safetensors' name of the type: ``F32``, ``F16``, ``BF16``, …
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """One safetensors file of a version.

    Attributes
    ----------
    file
        Its name beside the manifest.
    digest
        BLAKE2b-256 of the file, hexadecimal.
    """

    file: str
    nbytes: int
    digest: str
    tensors: tuple[TensorFacts, ...]


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """How a LoRA adapter is added to its base: W + scale B A.

    Attributes
    ----------
    base_digest
        `model_directory.weights_digest` of the weights that it was trained on.
    """

    rank: int
    scale: float
    base_digest: str


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """A complete version of weights in a store.

    Attributes
    ----------
    adapter
        For the kind ``"adapter"``; None for ``"full"``.
    """

    version: PolicyVersion
    model: ModelFacts
    buckets: tuple[WeightBucket, ...]
    kind: WeightKind = "full"
    adapter: AdapterFacts | None = None

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def tensors(self) -> tuple[TensorFacts, ...]:
        return tuple(tensor for bucket in self.buckets for tensor in bucket.tensors)

    @property
    def digest(self) -> str:
        """Digest of everything in the manifest, and so of the weights."""
        return json_digest(self._body())

    def to_json(self) -> str:
        """The text of the manifest's file; it carries its own digest, so that half of it is no manifest."""
        return json.dumps(self._body() | {"digest": self.digest}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read `to_json`.

        Raises
        ------
        WeightsRefused
            It is cut short, was changed, or is no manifest.
        """
        try:
            body = json.loads(text)
            digest = body.pop("digest")
            if body.pop("format") != FORMAT or body.pop("format_version") != FORMAT_VERSION:
                raise WeightsRefused(f"a manifest of another format: this version reads {FORMAT} {FORMAT_VERSION}")
            adapter = body["adapter"]
            manifest = cls(
                version=PolicyVersion(str(body["lineage"]), int(body["version"])),
                model=ModelFacts(**body["model"]),
                buckets=tuple(_bucket(each) for each in body["buckets"]),
                kind=body["kind"],
                adapter=None if adapter is None else AdapterFacts(**adapter),
            )
            check_types(manifest)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise WeightsRefused(f"a manifest that cannot be read ({type(error).__name__}: {error})") from None
        if manifest.digest != digest:
            raise WeightsRefused("a manifest that does not match its own digest")
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise `WeightsRefused` for what no writer of this package makes, such as a path as a file's name."""
        if self.kind not in _KINDS or (self.kind == "adapter") != (self.adapter is not None):
            raise WeightsRefused(f"a manifest of kind {self.kind!r} with adapter {self.adapter!r}")
        check_version(self.version)
        for bucket in self.buckets:
            if not _PLAIN_NAME.fullmatch(bucket.file):
                raise WeightsRefused(f"a manifest that names the file {bucket.file!r}")
        for what, names in (
            ("tensors", [tensor.name for tensor in self.tensors]),
            ("files", [bucket.file for bucket in self.buckets]),
        ):
            if len(set(names)) != len(names):
                raise WeightsRefused(f"a manifest that names {what} twice")

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "lineage": self.version.lineage,
            "version": self.version.number,
            "kind": self.kind,
            "nbytes": self.nbytes,
            "model": asdict(self.model),
            "adapter": None if self.adapter is None else asdict(self.adapter),
            "buckets": [
                {
                    "file": bucket.file,
                    "nbytes": bucket.nbytes,
                    "digest": bucket.digest,
                    "tensors": [[one.name, one.dtype, list(one.shape)] for one in bucket.tensors],
                }
                for bucket in self.buckets
            ],
        }


def is_lineage(name: str) -> bool:
    return _LINEAGE.fullmatch(name) is not None


def check_version(version: PolicyVersion) -> None:
    """Raise `BadInput` for a version that cannot be the name of a directory or an engine's label."""
    if not is_lineage(version.lineage):
        raise BadInput(f"lineage {version.lineage!r}: use up to 100 letters, digits, dots, dashes and underscores")
    if version.number < 0:
        raise BadInput(f"version {version.number}: use a number of at least 0")


def _bucket(body: Mapping[str, Any]) -> WeightBucket:
    return WeightBucket(
        file=str(body["file"]),
        nbytes=int(body["nbytes"]),
        digest=str(body["digest"]),
        tensors=tuple(
            TensorFacts(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in body["tensors"]
        ),
    )


def json_digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
