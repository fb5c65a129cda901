"""Directories that no other user can read, write or enter, whatever another user has put in their place before."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import LONGEST_SOCKET_PATH_BYTES

# Room for the name of a socket behind the directory's path.
_NAME_BYTES = 40
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def engines_directory() -> Path:
    """The directory of this user's engines on this machine: their sockets, and the records of their processes.

    All owners of engines share it, so that each start finds what a dead owner has left behind. It lies in the directory
    for temporary files, or in ``/tmp`` where the path would be too long for a socket. ``XDG_RUNTIME_DIR`` would not do:
    systemd removes it at the user's last logout, also under programs that go on.

    Raises
    ------
    BadInput
        See `private_directory`.
    """
    name = f"heddle-engines-{os.getuid()}"
    path = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(path)) + _NAME_BYTES > LONGEST_SOCKET_PATH_BYTES:
        path = Path("/tmp") / name
    return private_directory(path)


def private_directory(path: Path) -> Path:
    """Make a directory with mode 0700, or make sure that the one that is there is this user's alone.

    Raises
    ------
    BadInput
        It is a link or a file, belongs to another user, or others could have written into it; or it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        # Never through a link, which another user may have put there and may turn at any time.
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(
            f"directory {path} cannot be used: it must be a real directory of this user ({error.strerror}): "
            "remove it, or set TMPDIR to a directory of your own"
        ) from error
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            raise BadInput(
                f"directory {path} belongs to user {status.st_uid}: set TMPDIR to a directory of your own"
            )
        if status.st_mode & _OTHERS_WRITE:
            raise BadInput(f"directory {path} may be written by other users: remove it and what is in it")
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(handle, 0o700)
    finally:
        os.close(handle)
    return path
