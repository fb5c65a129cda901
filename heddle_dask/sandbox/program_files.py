"""Directories in which an untrusted program has written: measured and deleted, whatever is there.

Such a program can make folders deeper than any path may be long, and than Python may recurse.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from heddle_dask.core.errors import HeddleError
from heddle_dask.isolation.process_tree import start_of
from heddle_dask.sandbox.confinement import DiskUsage

_PREFIX = "heddle-sandbox-"
_ASIDE = "heddle-not-deleted-"
_LOG = logging.getLogger(__name__)


def new_folder() -> str:
    """A directory for one run, with the name of its owner: this process on this machine."""
    own = os.getpid()
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{own}-{start_of(own)}-{os.uname().nodename}-")


def reap_folders() -> None:
    """Delete the directories of runs whose owner has died."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid, _, rest = path.name.removeprefix(_PREFIX).partition("-")
        started, _, rest = rest.partition("-")
        host = rest.rpartition("-")[0]
        if pid.isdigit() and started.isdigit() and host == os.uname().nodename and start_of(int(pid)) != int(started):
            remove(str(path))


def directory_of_user(name: str) -> Path:
    """A directory of this user on this machine, in the one for temporary files.

    As root, other users may pass through it, for sandboxes have users of their own; they cannot list it.
    """
    path = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    mode = 0o711 if os.geteuid() == 0 else 0o700
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise HeddleError(f"directory {path} cannot be used: another user may have made it: remove it, or set TMPDIR")
    path.chmod(mode)
    return path


def disk_usage(folder: str, pids: Iterable[int] = ()) -> DiskUsage:
    """Usage of all below a folder; what disappears meanwhile counts 0 bytes.

    Parameters
    ----------
    pids
        Processes whose open files count too if they have been deleted from the same device.
    """
    used_bytes = files = 0
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    with contextlib.suppress(FileNotFoundError):
                        used_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                used_bytes, files = _deep_usage(folder)
                break
    deleted = deleted_usage(pids, folder)
    return DiskUsage(used_bytes + deleted.used_bytes, files + deleted.files)


def _deep_usage(folder: str) -> tuple[int, int]:
    """Bytes and files where folders are deeper than a path may be long: ``find`` goes from folder to folder."""
    found = subprocess.run(["find", folder, "-mindepth", "1", "-printf", "%b\\n"], capture_output=True)
    blocks = found.stdout.split()
    return sum(map(int, blocks)) * 512, len(blocks)


def deleted_usage(pids: Iterable[int], folder: str) -> DiskUsage:
    """Usage of files that these processes have open, and that are deleted, on the device of a folder."""
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or this process may not look into it
            device = os.stat(folder).st_dev
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    facts = os.stat(f"/proc/{pid}/fd/{name}")
                    if facts.st_nlink == 0 and facts.st_dev == device:
                        found[facts.st_ino] = facts.st_blocks * 512
    return DiskUsage(sum(found.values()), len(found))


def remove(folder: str) -> bool:
    """Delete a folder with all its content, if it is there; False where something of it cannot be deleted.

    Then it is told, and set aside under another name, so that it stands in the way of nothing.
    """
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder) or os.path.islink(folder):
        return True
    # Parts may be unreadable, or deep: these programs know no limit.
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        done = subprocess.run([*command, "--", folder], capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return True
    aside = os.path.join(os.path.dirname(folder), f"{_ASIDE}{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        os.rename(folder, aside)
    why = done.stderr.strip().partition("\n")[0][:300]
    _LOG.warning("%s cannot be deleted, and was set aside as %s: remove it by hand (%s)", folder, aside, why)
    return False
