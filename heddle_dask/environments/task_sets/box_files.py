"""Folders of files into a sandbox, and commands there with variables and a directory of their own."""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from heddle_dask.environments.base import ActionFailed
from heddle_dask.environments.program_sandbox import ProgramSandbox

_COPIED = "/tmp/.heddle-copied.tar"
_FILES_S = 300.0


def archive_of(entries: Iterable[tuple[Path, str]]) -> bytes:
    """A tar of files and folders, each with the name that it has there; the same for the same files."""
    made = io.BytesIO()

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        return info

    with tarfile.open(fileobj=made, mode="w") as archive:
        for path, name in entries:
            archive.add(path, name, filter=plain)
    return made.getvalue()


def archive_of_folder(folder: Path) -> bytes:
    """A tar of what is in a folder."""
    return archive_of((path, path.name) for path in sorted(folder.iterdir()))


async def put_folder(box: ProgramSandbox, folder: Path, target: str) -> None:
    """Write what is in a folder of this machine into one of the sandbox.

    Raises
    ------
    ActionFailed
        The image has no tar, or the files have no room.
    """
    await box.put(_COPIED, archive_of_folder(folder))
    place = shlex.quote(target)
    done = await box.exec(
        f"mkdir -p {place} && tar -xf {_COPIED} -C {place} && rm -f {_COPIED}", timeout_s=_FILES_S, label="sandbox file"
    )
    if not done.ok:
        raise ActionFailed("raised", f"files of {folder.name} into {target}: {done.text[-500:]}")


def command_in(command: str, directory: str = "", variables: Mapping[str, str] | None = None) -> str:
    """A command of the shell that has these variables and begins in this directory."""
    parts = [f"export {name}={shlex.quote(value)}" for name, value in (variables or {}).items()]
    parts += [f"mkdir -p {shlex.quote(directory)} && cd {shlex.quote(directory)} || exit 1"] if directory else []
    return "\n".join([*parts, command])
