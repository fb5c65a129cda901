"""One writer per journal and per store.

On a local file system this is an advisory lock that the kernel releases when its holder dies. On a file system that
several machines share, such a lock may be missing (Lustre without its mount option ``flock``), or reach the processes
of one node only (``localflock``, BeeGFS by default): there a lease is taken besides.

A lease is a file that names the one writer of a path. The holder touches its file every few seconds. Another process
takes the lease over when the holder is provably dead (a process of this machine that is gone) or has not touched the
file for `EXPIRY_S`, by the clock of the file system. It waits that long at most, and refuses as soon as it sees one.

Of several processes that take over one lease, one wins: each must first make the file ``LEASE.after-NONCE``, which
names the holder that is succeeded and which only one can make. It is a lease itself, and is taken over like one if its
maker dies. A holder that was stopped for long and goes on finds at its next write that the lease is another's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from heddle_dask.core.errors import BadInput

_LOG = logging.getLogger(__name__)
BEAT_S = 5.0
# Twelve touches: a file server that pauses for less makes nobody lose a run.
EXPIRY_S = 60.0
# An old lease is looked at this often while its end is waited for.
_LOOK_S = 0.5
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lease, as its file says.

    Attributes
    ----------
    nonce
        Names this one lease; never used twice.
    machine
        Boot and process namespace in which `pid` means something.
    started_ticks
        When the process started, in ticks since the boot: a later process may have its pid.
    job
        The SLURM job of the holder, for the message; empty outside of one.
    """

    nonce: str
    host: str
    machine: str
    pid: int
    started_ticks: int
    job: str = ""

    @classmethod
    def this_process(cls) -> Holder:
        pid = os.getpid()
        return cls(
            secrets.token_hex(16),
            socket.gethostname(),
            _machine(),
            pid,
            _process(pid)[1],
            os.environ.get("SLURM_JOB_ID", ""),
        )

    @property
    def is_here(self) -> bool:
        """Whether its process can be looked up on this machine."""
        return self.machine == _machine() and self.host == socket.gethostname()

    @property
    def is_dead(self) -> bool:
        """Whether its process, one of this machine, is gone."""
        state, started_ticks = _process(self.pid)
        return state in ("", "Z", "X") or started_ticks != self.started_ticks

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"


@dataclass(frozen=True, slots=True)
class _Found:
    """A lease file as it was read; without holder if its text was incomplete."""

    name: str
    holder: Holder | None
    touched_s: float


class Lease:
    """A lease that this process holds. Make one with `take`; `release` it."""

    def __init__(self, path: Path, holder: Holder, beat_s: float, expiry_s: float) -> None:
        self.holder = holder
        self._path = path
        self._beat_s = beat_s
        self._expiry_s = expiry_s
        self._lost = ""
        self._touched_s = time.monotonic()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease {path.name}", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, subject: Path, beat_s: float = BEAT_S, expiry_s: float = EXPIRY_S) -> Lease:
        """Become the one writer of `subject`; its lease is the file ``SUBJECT.lease`` beside it.

        Raises
        ------
        BadInput
            Another process holds the lease.
        OSError
            The file cannot be written.
        """
        path = subject.with_name(subject.name + ".lease")
        holder = Holder.this_process()
        mine = path.with_name(f"{path.name}.{holder.nonce}")
        _write(mine, holder)
        try:
            _acquire(path, mine, holder, subject, expiry_s)
        finally:
            mine.unlink(missing_ok=True)
        return cls(path, holder, beat_s, expiry_s)

    def check(self) -> None:
        """Before a write: make sure that the lease is still this process's; costs nothing while it is fresh.

        Raises
        ------
        OSError
            Another process has taken it over, or the file system does not answer.
        """
        if time.monotonic() - self._touched_s > self._expiry_s / 2:
            self._touch()
        if self._lost:
            raise OSError(errno.ESTALE, self._lost)
        if time.monotonic() - self._touched_s > self._expiry_s:
            raise OSError(errno.ESTALE, f"its lease {self._path} could not be renewed in time")

    def release(self) -> None:
        """Give the lease back. A second call does nothing."""
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._is_mine():
                self._path.unlink()

    def _beat(self) -> None:
        while not self._released.wait(self._beat_s) and not self._lost:
            self._touch()

    def _touch(self) -> None:
        try:
            if self._is_mine():
                os.utime(self._path)
                self._touched_s = time.monotonic()
            else:
                found = _read(self._path)
                by = found.holder if found is not None else None
                self._lost = f"another process ({by}) has taken it over" if by else f"{self._path} was removed"
        except OSError as error:
            _LOG.warning("lease %s: %s", self._path, error.strerror)

    def _is_mine(self) -> bool:
        found = _read(self._path)
        return found is not None and found.name == self.holder.nonce


def _acquire(path: Path, mine: Path, holder: Holder, subject: Path, expiry_s: float) -> None:
    """Make `path` this process's lease: as the first, or after a holder that is dead or silent."""
    while not _made(mine, path, holder):
        found = _read(path)
        if found is None:
            continue  # released in between
        _await_end(path, mine, found, subject, expiry_s)
        claim = path.with_name(f"{path.name}.after-{found.name}")
        _acquire(claim, mine, holder, subject, expiry_s)
        try:
            now = _read(path)
            if now is not None and now.name == found.name:
                # A copy: `mine` is still needed, and has the same content.
                spare = mine.with_name(mine.name + ".next")
                _write(spare, holder)
                os.replace(spare, path)
                return
        finally:
            claim.unlink(missing_ok=True)


def _await_end(path: Path, mine: Path, found: _Found, subject: Path, expiry_s: float) -> None:
    """Return when the holder is dead or silent for too long; refuse when it lives."""
    holder = found.holder
    if holder is not None and holder.is_here:
        if holder.is_dead:
            return
        raise _refusal(subject, holder)
    seen_s = found.touched_s
    is_told = False
    while True:
        os.utime(mine)  # the clock of the file system, which has touched the lease
        silent_s = mine.stat().st_mtime - seen_s
        if silent_s >= expiry_s:
            return
        if not is_told:
            is_told = True
            wait_s = expiry_s - silent_s
            _LOG.warning("%s was written by %s: waiting up to %.0f s whether it is", subject, holder, wait_s)
        time.sleep(_LOOK_S)
        now = _read(path)
        if now is None or now.name != found.name:
            return  # released, or succeeded: the caller looks again
        if now.touched_s != seen_s:
            raise _refusal(subject, holder)


def _refusal(subject: Path, holder: Holder | None) -> BadInput:
    by = str(holder) if holder is not None else "another process"
    return BadInput(f"{subject} is being written by {by}: wait for it or choose another path")


def _made(mine: Path, path: Path, holder: Holder) -> bool:
    """Whether this process has made `path`, at once with its whole content; False if it exists."""
    try:
        os.link(mine, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        _write(path, holder)
    except FileExistsError:
        return False
    return True


def _write(path: Path, holder: Holder) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, json.dumps(asdict(holder)).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> _Found | None:
    """The lease at `path`, read anew from the file server; None if there is none."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except FileNotFoundError:
        return None
    try:
        holder = Holder(**json.loads(text))
    except (ValueError, TypeError):
        return _Found(f"inode-{status.st_ino}", None, status.st_mtime)
    return _Found(holder.nonce, holder, status.st_mtime)


def _process(pid: int) -> tuple[str, int]:
    """State and start of a process, as the kernel tells them; an empty state if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    # The name before it may contain anything.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


@cache
def _machine() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


# What file systems without `flock` answer; EBADF: NFS locks no directory (the journal of a run is locked there).
_NO_LOCKS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_SHARED = frozenset(
    {
        *("nfs", "nfs4", "lustre", "beegfs", "gpfs", "ceph", "cifs", "smb3", "afs", "panfs", "wekafs"),
        *("orangefs", "pvfs2", "ocfs2", "gfs2", "vxfs", "9p", "virtiofs", "fuse"),
    }
)


class WriterLock:
    """What this process holds on an open file or directory."""

    def __init__(self, descriptor: int, lease: Lease | None) -> None:
        self.descriptor = descriptor
        self._lease = lease

    def check(self) -> None:
        """Before a write.

        Raises
        ------
        OSError
            Another process has become the writer.
        """
        if self._lease is not None:
            self._lease.check()

    def adopt(self, copy: WriterLock) -> None:
        """Go on with the open file of `copy`, which has taken the place of this one; its own lease ends."""
        os.close(self.descriptor)
        self.descriptor, copy.descriptor = copy.descriptor, -1
        copy.release()

    def release(self) -> None:
        """Give everything back and close the descriptor. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._lease is not None:
            self._lease.release()


def lock_or_refuse(descriptor: int, path: Path) -> WriterLock:
    """Lock an open file or directory for this process, until the lock is released.

    Raises
    ------
    BadInput
        If another process holds the lock, or the lock cannot be asked for. The descriptor is then closed.
    """
    try:
        needs_lease = not _locked_by_kernel(descriptor) or is_shared(path)
        return WriterLock(descriptor, Lease.take(path.absolute()) if needs_lease else None)
    except BlockingIOError:
        os.close(descriptor)
        raise BadInput(f"{path} is being written by another process: wait for it or choose another path") from None
    except OSError as error:
        os.close(descriptor)
        raise BadInput(f"cannot lock {path}: {error.strerror}") from None
    except BaseException:
        os.close(descriptor)
        raise


def is_shared(path: Path) -> bool:
    """Whether the path is on a file system that other machines may write too."""
    kind = file_system_of(path.resolve(), _mounts())
    return kind.partition(".")[0] in _SHARED


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds an absolute path, by the text of ``/proc/self/mountinfo``."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        point = Path(fields.split()[4].encode().decode("unicode_escape"))
        # Of two file systems on one directory the later one is seen.
        if path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), source.split()[0]
    return kind


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""


def _locked_by_kernel(descriptor: int) -> bool:
    """Whether `flock` has locked it; False where the file system knows no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
