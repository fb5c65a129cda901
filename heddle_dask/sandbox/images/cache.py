"""The unpacked images of one machine: each is unpacked once, by the first process that wants it, and shared.

An image lies in a folder named by its digest, which appears whole (by a rename). A process that uses an image holds a
shared lock on it; when room is short, images that were not used for longest and that no process holds are deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from heddle_dask.sandbox.images.archive import BadImage, ImageArchive, ImageDescription, is_layout, open_image
from heddle_dask.sandbox.images.identity import folder_digest
from heddle_dask.sandbox.images.layers import RootFolder
from heddle_dask.sandbox.program_files import directory_of_user, remove

IMAGE_UID = 1_099_000_000
"""As root: owner of the files of all images, and user of the processes in their sandboxes. Not one that exists."""

_MOST_BYTES = 64 << 30
_MOST_FILES = 3_000_000
_SPARE_BYTES = 1 << 30
_FORM = 1  # to be changed with what an unpacked image looks like
_FACTS = "image.json"


@dataclass(frozen=True, slots=True)
class UnpackedImage:
    """An image on this machine.

    Attributes
    ----------
    root
        Its files.
    environment
        Pairs of name and value.
    uid, gid, home
        Its user, as the image's own files name it.
    directory
        Where its commands start, without links.
    """

    digest: str
    root: str
    environment: tuple[tuple[str, str], ...] = ()
    uid: int = 0
    gid: int = 0
    home: str = "/root"
    directory: str = "/"


def images_directory() -> Path:
    return directory_of_user("heddle-images")


def sweep(directory: Path) -> None:
    """Delete what processes that died while they unpacked an image have left."""
    for left in directory.glob("*.new-*"):
        entry = directory / left.name.partition(".new-")[0]
        with contextlib.suppress(OSError), open(f"{entry}.unpacking", "ab") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while a process unpacks it
            remove(str(left))


def image_digest(source: str) -> str:
    """What names the content of an image; empty if it is not on this machine."""
    path = Path(source)
    if not path.exists():
        return ""
    if _is_root(path):
        return f"sha256:{folder_digest(path)}"
    with open_image(path) as image:
        return image.description.digest


def _is_root(path: Path) -> bool:
    return path.is_dir() and not is_layout(path)


class HeldImage:
    """An unpacked image, which stays until it is released."""

    def __init__(self, image: UnpackedImage, lock: int) -> None:
        self.image = image
        self._lock = lock

    @classmethod
    def of(cls, source: str, digest: str = "", base: Path | None = None) -> HeldImage:
        """Unpack an image if this machine does not have it; takes as long as that.

        Parameters
        ----------
        source
            A folder or a file.
        digest
            The one that it must have; empty: any.

        Raises
        ------
        BadImage
            There is none, or another one, or it cannot be unpacked.
        """
        directory = images_directory() if base is None else base
        is_known = digest and _unpacked(directory, digest) is not None
        found = digest if is_known else image_digest(source)
        if not found:
            raise BadImage(f"image {source}: it is not on {os.uname().nodename}: give a path that all workers have")
        if digest not in ("", found):
            raise BadImage(f"image {source}: on {os.uname().nodename} it is another one than where the run was started")
        entry = _entry(directory, found)
        lock = os.open(f"{entry}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(3):
                fcntl.flock(lock, fcntl.LOCK_SH)
                image = _unpacked(directory, found)
                if image is not None:
                    os.utime(entry)
                    return cls(image, lock)
                fcntl.flock(lock, fcntl.LOCK_UN)
                # Another lock than that of its users, for whose end no process must wait here.
                with open(f"{entry}.unpacking", "ab") as turn:
                    fcntl.flock(turn, fcntl.LOCK_EX)
                    if _unpacked(directory, found) is None:
                        _unpack(Path(source), directory, found)
            raise BadImage(f"image {source}: it was deleted again and again: make room in {directory}")
        except BaseException:
            os.close(lock)
            raise

    def release(self) -> None:
        """Let it be deleted when room is short; a second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _entry(directory: Path, digest: str) -> Path:
    return directory / digest.removeprefix("sha256:")


def _boot() -> str:
    """Files that were not on the disk yet when the machine went down are not trusted."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {_FORM}"


def _unpacked(directory: Path, digest: str) -> UnpackedImage | None:
    entry = _entry(directory, digest)
    try:
        facts = json.loads((entry / _FACTS).read_bytes())
        if facts.pop("boot") != _boot():
            return None
        pairs = tuple((str(name), str(value)) for name, value in facts.pop("environment"))
        return UnpackedImage(**facts, root=str(entry / "root"), environment=pairs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _unpack(source: Path, directory: Path, digest: str) -> None:
    """Unpack an image into its folder; the caller holds its lock."""
    entry = _entry(directory, digest)
    for left in (entry, *directory.glob(f"{entry.name}.new-*")):  # by a process that died
        remove(str(left))
    new = Path(tempfile.mkdtemp(prefix=f"{entry.name}.new-", dir=directory))
    owner = IMAGE_UID if os.geteuid() == 0 else None
    try:
        root = new / "root"
        if _is_root(source):
            image = _copied(source, root, owner, digest)
        else:
            root.mkdir()
            root.chmod(0o755)
            with open_image(source) as archive:
                image = _written(archive, root, owner, directory)
        facts = {name: value for name, value in asdict(image).items() if name != "root"}
        (new / _FACTS).write_text(json.dumps({**facts, "boot": _boot()}), encoding="utf-8")
        if owner is not None:
            os.chown(root, owner, owner)
            os.chown(new, owner, owner)
        new.rename(entry)
    except OSError as error:
        raise BadImage(f"image {source}: {error.strerror or error}") from error
    finally:
        remove(str(new))


def _copied(source: Path, root: Path, owner: int | None, digest: str) -> UnpackedImage:
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", "--", source, root], capture_output=True, text=True, errors="replace"
    )
    if not done.returncode and owner is not None:
        done = subprocess.run(
            ["chown", "-Rh", f"{owner}:{owner}", "--", root], capture_output=True, text=True, errors="replace"
        )
    if done.returncode:
        raise BadImage(f"image {source}: it was not copied: {done.stderr.strip()[-300:]}")
    root.chmod(0o755)
    return _finished(RootFolder(root, owner, 0, 0), ImageDescription(digest, (), (), "", ""))


def _written(archive: ImageArchive, root: Path, owner: int | None, directory: Path) -> UnpackedImage:
    layers = archive.description.layers
    packed_bytes = 0
    for layer in layers:
        with archive.open(layer) as file:
            packed_bytes += file.seek(0, os.SEEK_END)
    free_bytes = _make_room(directory, 3 * packed_bytes + _SPARE_BYTES)
    folder = RootFolder(root, owner, min(_MOST_BYTES, max(0, free_bytes - _SPARE_BYTES)), _MOST_FILES)
    for layer in layers:
        with archive.open(layer) as file:
            folder.apply(file, layer.digest)
    return _finished(folder, archive.description)


def _make_room(directory: Path, needed_bytes: int) -> int:
    """Delete what was not used for longest until there is room; returns the bytes that are free."""
    entries = sorted(directory.glob("[0-9a-f]*/image.json"), key=lambda path: path.parent.stat().st_mtime)
    for entry in (facts.parent for facts in entries):
        if _free_bytes(directory) >= needed_bytes:
            break
        with contextlib.suppress(OSError), open(f"{entry}.lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused if a sandbox uses it
            gone = entry.rename(f"{entry}.new-{os.getpid()}")  # half deleted it must not be found
            remove(str(gone))
    return _free_bytes(directory)


def _free_bytes(directory: Path) -> int:
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def _finished(root: RootFolder, image: ImageDescription) -> UnpackedImage:
    """Add what every image needs to run: places for /proc, /dev and /tmp, the name localhost; read its user."""
    for name in ("proc", "dev"):
        path = Path(root.path, name)
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
        root.folder([name])
    os.chmod(root.folder(["tmp"]), 0o1777)
    if "localhost" not in root.read("etc/hosts"):
        root.write("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
    uid, gid, home = _user(image.user, root)
    place = root.folder(image.directory.split("/")).removeprefix(root.path)
    return UnpackedImage(image.digest, root.path, image.environment, uid, gid, home, place or "/")


def _user(given: str, root: RootFolder) -> tuple[int, int, str]:
    name, _, group = (given or "0").partition(":")
    accounts = list(_accounts(root.read("etc/passwd"), 6))
    mine = [each for each in accounts if name in (each[0], each[2])]
    if not mine and not _is_number(name):
        raise BadImage(f"its user {given[:40]!r} is not in its /etc/passwd")
    uid, gid, home = (int(mine[0][2]), int(mine[0][3]), mine[0][5]) if mine else (int(name), 0, "/")
    if group:
        groups = {each[0]: each[2] for each in _accounts(root.read("etc/group"), 3)}
        number = groups.get(group, group)
        if not _is_number(number):
            raise BadImage(f"its group {group[:40]!r} is not in its /etc/group")
        gid = int(number)
    return uid, gid, home if home.startswith("/") else "/"


def _accounts(text: str, least: int) -> Iterator[list[str]]:
    for line in text.splitlines():
        parts = line.split(":")
        if len(parts) >= least and all(_is_number(each) for each in parts[2 : least - 2]):
            yield parts


def _is_number(text: str) -> bool:
    """Whether a user or a group can have this number."""
    return text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < 1 << 31
