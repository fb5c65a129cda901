"""An image in a file or a folder: its configuration, and the layers that make its files. Nothing read is trusted.

Three forms are known: the tar of ``docker save`` (``manifest.json``), an OCI layout in a tar, and one in a folder. An
image has the same digest in each: its layers are known by their content, and of its configuration only what is used
here counts, because programs that copy images write the rest in ways of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import posixpath
import re
import stat
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from heddle_dask.sandbox.stateful.contract import SandboxFailed

_MOST_JSON_BYTES = 8 << 20
_MOST_FILES_OF_ARCHIVE = 10_000
_MOST_LAYERS = 500
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_T = TypeVar("_T")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class BadImage(SandboxFailed):
    """An image cannot be used; the message is one line."""


@dataclass(frozen=True, slots=True)
class ImageLayer:
    """One layer: where the archive has it, and the digest of its uncompressed tar."""

    place: str
    digest: str


@dataclass(frozen=True, slots=True)
class ImageDescription:
    """What an image says of itself.

    Attributes
    ----------
    digest
        Of the digests of its layers, and of all that follows.
    layers
        The lowest first.
    environment
        Pairs of name and value.
    user
        ``"name"``, ``"name:group"`` or numbers; empty: root.
    directory
        Where its commands start; empty: the root.
    """

    digest: str
    layers: tuple[ImageLayer, ...]
    environment: tuple[tuple[str, str], ...]
    user: str
    directory: str


class _Archive(Protocol):
    """The files of an image by name."""

    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> IO[bytes]: ...


class ImageArchive:
    """An open image."""

    def __init__(self, archive: _Archive) -> None:
        self._archive = archive
        if archive.has("manifest.json"):
            config, places = self._of_docker()
        else:
            config, places = self._of_layout()
        self.description = _description(config, places)

    def open(self, layer: ImageLayer) -> IO[bytes]:
        """The bytes of a layer as they lie there, maybe compressed."""
        return self._archive.open(layer.place)

    def _of_docker(self) -> tuple[bytes, list[str]]:
        images = _list_of(dict, _parsed(self._read("manifest.json")), "manifest.json")
        if len(images) != 1:
            raise BadImage(f"it has {len(images)} images: save one alone")
        places = _list_of(str, images[0].get("Layers") or [], "its layers")
        return self._read(_text(images[0].get("Config"), "the name of its configuration")), places

    def _of_layout(self) -> tuple[bytes, list[str]]:
        index = _table(_parsed(self._read("index.json")), "index.json")
        found = [each for each in self._manifests(index, depth=3) if _fits(each)]
        if len(found) != 1:
            raise BadImage(f"it has {len(found)} images for this machine: copy one alone")
        manifest = _table(_parsed(self._read(_blob(found[0]))), "its manifest")
        layers = _list_of(dict, manifest.get("layers") or [], "its layers")
        config = self._read(_blob(_table(manifest.get("config"), "its configuration")))
        if f"sha256:{sha256(config).hexdigest()}" != manifest["config"]["digest"]:
            raise BadImage("its configuration is not the one of its digest: copy it again")
        return config, [_blob(layer) for layer in layers]

    def _manifests(self, index: Mapping[str, Any], depth: int) -> Iterator[Mapping[str, Any]]:
        """Those of an index, and of indexes in it."""
        for each in _list_of(dict, index.get("manifests") or [], "its manifests")[:_MOST_LAYERS]:
            if "index" not in str(each.get("mediaType")) and "manifest.list" not in str(each.get("mediaType")):
                yield each
            elif depth and self._archive.has(_blob(each)):
                yield from self._manifests(_table(_parsed(self._read(_blob(each))), "an index"), depth - 1)

    def _read(self, name: str) -> bytes:
        with self._archive.open(name) as file:
            content = file.read(_MOST_JSON_BYTES + 1)
        if len(content) > _MOST_JSON_BYTES:
            raise BadImage(f"{name[:80]} is longer than {_MOST_JSON_BYTES:,} bytes")
        return content


class _TarArchive:
    """Files of a tar by name. Links between them are followed: older versions of docker write equal layers so."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._members: dict[str, tarfile.TarInfo] = {}
        while member := tar.next():
            self._members[posixpath.normpath(member.name)] = member
            if len(self._members) > _MOST_FILES_OF_ARCHIVE:
                raise BadImage(f"the tar has more than {_MOST_FILES_OF_ARCHIVE:,} files: it is no image")

    def has(self, name: str) -> bool:
        return name in self._members

    def open(self, name: str) -> IO[bytes]:
        member = self._members.get(posixpath.normpath(name))
        for _ in range(4):
            if member is None or not (member.issym() or member.islnk()):
                break
            folder = posixpath.dirname(member.name) if member.issym() else ""
            member = self._members.get(posixpath.normpath(posixpath.join(folder, member.linkname)))
        file = self._tar.extractfile(member) if member is not None and member.isreg() else None
        if file is None:
            raise BadImage(f"it has no file {name[:100]!r}: save or copy it again")
        return file


class _FolderArchive:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def open(self, name: str) -> IO[bytes]:
        return open_regular(self._folder / name)


def open_regular(path: Path) -> IO[bytes]:
    """Open a file that is one: no fifo that never answers, no device that never ends."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return os.fdopen(handle, "rb")
        os.close(handle)
    raise BadImage(f"{path.name!r} is no file that can be read")


def is_layout(folder: Path) -> bool:
    """Whether a folder is an OCI layout, and not a root file system."""
    return (folder / "oci-layout").is_file() and (folder / "index.json").is_file()


@contextmanager
def open_image(path: Path) -> Iterator[ImageArchive]:
    """Open an image.

    Raises
    ------
    BadImage
        It is none, or a part of it is missing or wrong.
    """
    try:
        if path.is_dir():
            yield ImageArchive(_FolderArchive(path))
            return
        with open_regular(path) as file, _tar_of(file) as tar:
            yield ImageArchive(_TarArchive(tar))
    except BadImage as error:
        raise BadImage(f"image {path}: {error}") from error
    except (OSError, tarfile.TarError, zlib.error, EOFError, ValueError, RecursionError, MemoryError) as error:
        raise BadImage(f"image {path}: {' '.join(str(error).split())[:200] or type(error).__name__}") from error


def _tar_of(file: IO[bytes]) -> tarfile.TarFile:
    beginning = file.read(8)
    file.seek(0)
    if beginning[:2] == b"\x1f\x8b" or beginning[:4] == b"\x28\xb5\x2f\xfd":
        raise BadImage("it is compressed as a whole: decompress it first (gunzip)")
    try:
        return tarfile.open(fileobj=file, mode="r:")
    except tarfile.ReadError:
        raise BadImage(
            "it is no tar: use what docker save, or skopeo copy to docker-archive: or oci-archive:, have written"
        ) from None


# -- what the JSON of an image must look like ------------------------------------------------------


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadImage("a part of it is no JSON") from None


def _table(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadImage(f"{what} is {value!r:.80}, not a table")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise BadImage(f"{what} is {value!r:.80}, not a text")
    return value


def _list_of(kind: type[_T], value: Any, what: str) -> list[_T]:
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise BadImage(f"{what} are {value!r:.80}, not a list as images have it")
    return value


def _blob(described: Mapping[str, Any]) -> str:
    digest = _text(described.get("digest"), "a digest")
    if not _DIGEST.fullmatch(digest):
        raise BadImage(f"a digest is {digest[:80]!r}, not sha256: with 64 digits")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _fits(described: Mapping[str, Any]) -> bool:
    """Whether a manifest of an index is an image, and not for another kind of machine."""
    place = _table(described.get("platform") or {}, "a platform")
    machine = _MACHINES.get(platform.machine(), platform.machine())
    return bool(place.get("os", "linux") == "linux" and place.get("architecture", machine) == machine)


def _description(config: bytes, places: list[str]) -> ImageDescription:
    form = _table(_parsed(config), "its configuration")
    rootfs = _table(form.get("rootfs"), "its rootfs")
    digests = _list_of(str, rootfs.get("diff_ids") or [], "its layers")
    if len(digests) != len(places) or len(digests) > _MOST_LAYERS or not all(map(_DIGEST.fullmatch, digests)):
        raise BadImage(f"its configuration names {len(digests)} layers, and it has {len(places)}: copy it again")
    runs = _table(form.get("config") or {}, "its configuration")
    pairs = [each.partition("=") for each in _list_of(str, runs.get("Env") or [], "its variables")]
    environment = tuple((name, _text(value, "a variable")) for name, _, value in pairs if name and "\0" not in name)
    user = _text(runs.get("User") or "", "its user")
    directory = _text(runs.get("WorkingDir") or "", "its working directory")
    content = json.dumps([digests, environment, user, directory]).encode()
    layers = tuple(ImageLayer(*each) for each in zip(places, digests, strict=True))
    return ImageDescription(f"sha256:{sha256(content).hexdigest()}", layers, environment, user, directory)
