"""Layers of an image, written one over the other into a folder.

A layer is not trusted: no path of it leaves the folder, in which only this process may write meanwhile. The users of an
image become one, the owner of the folder.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import posixpath
import shutil
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import IO

from heddle_dask.sandbox.images.archive import BadImage
from heddle_dask.sandbox.program_files import remove

_CHUNK_BYTES = 1 << 20
# Python's reader of tars holds a header, such as one of long names, in memory as a whole.
_MOST_READ_BYTES = 1 << 20
_MOST_LINKS = 40
_LATEST_S = 1 << 33
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


class Zstd:
    """Decompresses a file by the program of that name, of which Python has no module.

    Attributes
    ----------
    output
        The decompressed bytes; they end too soon where the file is damaged.
    """

    def __init__(self, file: IO[bytes]) -> None:
        program = shutil.which("zstd")
        if program is None:
            raise BadImage("a layer is compressed by zstd: install the package zstd")
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen([program, "-dcq"], stdin=pipe, stdout=pipe, stderr=null)
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self._feeding = threading.Thread(target=self._feed, args=(file,), daemon=True)
        self._feeding.start()

    def _feed(self, file: IO[bytes]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as entry:  # it has ended
            shutil.copyfileobj(file, entry, _CHUNK_BYTES)

    def close(self) -> None:
        self._process.kill()
        self._feeding.join()
        self.output.close()
        self._process.wait()


class LayerStream:
    """The uncompressed bytes of a layer, read once and forwards; hashed, and never more than a limit."""

    def __init__(self, file: IO[bytes], most_bytes: int) -> None:
        beginning = file.read(4)
        file.seek(0)
        self._file = file
        self._zstd: Zstd | None = None
        if beginning[:2] == b"\x1f\x8b":
            self._file = gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[assignment]
        elif beginning == b"\x28\xb5\x2f\xfd":
            self._zstd = Zstd(file)
            self._file = self._zstd.output
        self._left_bytes = most_bytes
        self._sum = sha256()
        self._position = 0

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_READ_BYTES:
            raise BadImage("a header in a layer is too long")
        chunks = []
        while size and (chunk := self._file.read(size)):
            chunks.append(chunk)
            size -= len(chunk)
        content = b"".join(chunks)
        self._sum.update(content)
        self._position += len(content)
        self._left_bytes -= len(content)
        if self._left_bytes < 0:
            raise BadImage("it is larger than the room for it here: make room, or set TMPDIR to a larger disk")
        return content

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise BadImage("a header in a layer points backwards")
        while self._position < position:
            if not self.read(min(_CHUNK_BYTES, position - self._position)):
                raise BadImage("a layer ends too soon: copy it again")

    def close(self) -> None:
        if self._zstd is not None:
            self._zstd.close()

    def digest(self) -> str:
        """Of all bytes, those after the end of the tar too."""
        while self.read(_CHUNK_BYTES):
            pass
        return f"sha256:{self._sum.hexdigest()}"


class RootFolder:
    """A root file system that layers are written into.

    Parameters
    ----------
    owner
        User that all files are given to; None: this process's own.
    most_bytes, most_files
        Limits of all layers together.
    """

    def __init__(self, path: Path, owner: int | None, most_bytes: int, most_files: int) -> None:
        self.path = str(path)
        self._owner = owner
        self.bytes_left = most_bytes
        self._files_left = most_files
        self._folders: dict[str, str] = {}
        # What the layer at work has written, and the folders on the way there: its whiteouts spare them.
        self._added: set[str] = set()

    def apply(self, file: IO[bytes], digest: str) -> None:
        """Write one layer over those before it.

        Raises
        ------
        BadImage
            It is not the layer of that digest, or none that can be written.
        """
        with contextlib.closing(LayerStream(file, self.bytes_left)) as stream:
            self._apply(stream)
            if stream.digest() != digest:
                raise BadImage("a layer is not the one of its digest: copy it again")
            self.bytes_left -= stream.tell()

    def _apply(self, stream: LayerStream) -> None:
        self._folders.clear()
        self._added = {self.path}
        with tarfile.open(fileobj=stream, mode="r:") as tar:  # type: ignore[call-overload]
            while member := tar.next():
                tar.members.clear()  # it would keep millions
                self._files_left -= 1
                if self._files_left < 0:
                    raise BadImage("it has too many files")
                self._write(member, tar)

    def _write(self, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in member.name:
            raise BadImage(f"a layer has the path {member.name[:80]!r}")
        if not parts:
            return
        folder, name = self.folder(parts[:-1]), parts[-1]
        path = f"{folder}/{name}"
        if name == _OPAQUE:
            self._drop_lower(f"{folder}/{each}" for each in os.listdir(folder))
        elif name.startswith(_WHITEOUT):
            hidden = name.removeprefix(_WHITEOUT)
            if hidden in ("", ".", ".."):
                raise BadImage(f"a layer has the path {member.name[:80]!r}")
            self._drop_lower([f"{folder}/{hidden}"])
        elif member.isreg() or member.isdir() or member.issym() or member.islnk():  # devices and fifos: left out
            self._make(member, path, tar)
            while path not in self._added:
                self._added.add(path)
                path = posixpath.dirname(path)

    def _make(self, member: tarfile.TarInfo, path: str, tar: tarfile.TarFile) -> None:
        source = self._linked(member.linkname) if member.islnk() else ""
        if source == path:
            return
        self._make_room(path, keeps_folder=member.isdir())
        if member.isdir():
            if not os.path.isdir(path):
                os.mkdir(path)
            os.chmod(path, member.mode & 0o1777 | 0o700)
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            os.link(source, path, follow_symlinks=False)
            return
        else:
            self._write_file(member, path, tar)
        self._give(path)

    def _write_file(self, member: tarfile.TarInfo, path: str, tar: tarfile.TarFile) -> None:
        if not 0 <= member.size <= self.bytes_left:  # a sparse file may be longer than its layer
            raise BadImage("it is larger than the room for it here: make room, or set TMPDIR to a larger disk")
        if member.issparse():
            self.bytes_left -= member.size
        content = tar.extractfile(member)
        assert content is not None
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb", buffering=0) as file:
            left = member.size
            while left:
                chunk = content.read(min(_CHUNK_BYTES, left))
                if not chunk:
                    raise BadImage("a layer ends too soon: copy it again")
                file.write(chunk)
                left -= len(chunk)
            os.fchmod(handle, member.mode & 0o777 | 0o400)
            changed_s = min(max(0, member.mtime), _LATEST_S)
            os.utime(handle, (changed_s, changed_s))

    def _linked(self, name: str) -> str:
        """The file that a hard link names."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if not parts or ".." in parts:
            raise BadImage(f"a layer has a link to {name[:80]!r}")
        return f"{self.folder(parts[:-1])}/{parts[-1]}"

    def _make_room(self, path: str, *, keeps_folder: bool) -> None:
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode) and keeps_folder:
            return
        self._drop(path, is_folder=stat.S_ISDIR(mode))

    def _drop_lower(self, paths: Iterable[str]) -> None:
        """Delete what the layers below have there."""
        for path in paths:
            if not os.path.lexists(path):
                continue
            is_folder = os.path.isdir(path) and not os.path.islink(path)
            if path not in self._added:
                self._drop(path, is_folder=is_folder)
            elif is_folder:
                self._drop_lower(f"{path}/{each}" for each in os.listdir(path))

    def _drop(self, path: str, *, is_folder: bool) -> None:
        self._folders.clear()
        remove(path) if is_folder else os.unlink(path)

    def folder(self, parts: list[str]) -> str:
        """The folder at a path as a process in the image would find it; what is missing is made."""
        asked = "/".join(parts)
        if asked in self._folders:
            return self._folders[asked]
        waiting, place, links = parts[::-1], self.path, 0
        while waiting:
            part = waiting.pop()
            if part in ("", "."):
                continue
            if part == "..":
                place = self.path if place == self.path else posixpath.dirname(place)
                continue
            path = f"{place}/{part}"
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                os.mkdir(path, 0o755)
                self._give(path)
                mode = stat.S_IFDIR
            if stat.S_ISLNK(mode):
                links += 1
                if links > _MOST_LINKS:
                    raise BadImage(f"its links in {asked[:80]!r} lead in a circle")
                target = os.readlink(path)
                place = self.path if target.startswith("/") else place
                waiting += target.split("/")[::-1]
            elif stat.S_ISDIR(mode):
                place = path
            else:
                raise BadImage(f"{asked[:80]!r} in it is no folder")
        self._folders[asked] = place
        return place

    def _give(self, path: str) -> None:
        if self._owner is not None:
            os.chown(path, self._owner, self._owner, follow_symlinks=False)

    def read(self, name: str, most_bytes: int = 1 << 20) -> str:
        """A text file of the root; empty where it is none."""
        parts = [part for part in name.split("/") if part]
        path = Path(self.folder(parts[:-1]), parts[-1])
        if path.is_symlink() or not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(most_bytes).decode("utf-8", "replace")

    def write(self, name: str, text: str) -> None:
        """Write a file of the root in place of what is there."""
        *parts, last = name.split("/")
        path = f"{self.folder(parts)}/{last}"
        self._make_room(path, keeps_folder=False)
        Path(path).write_text(text, encoding="utf-8")
        os.chmod(path, 0o644)
        self._give(path)
