"""The one command line of bubblewrap: every sandbox with namespaces is made by `enclosed`, as root and as a user.

What all have in common is here: namespaces, the filter of system calls, the devices, shared memory of a stated size,
a read-only root. What differs is an `Inside`: what is mounted, where the command starts, whose it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from heddle_dask.sandbox.system_calls import filter_fd

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Inside:
    """What a command finds in its sandbox.

    Attributes
    ----------
    root
        Arguments of bubblewrap that make ``/`` and what is below it.
    read_only
        Whether all of the root is read-only afterwards.
    writable
        Arguments that mount the private places, after the root, the devices and ``/proc``; they stay writable.
    folder
        Working directory, by its path inside.
    command
        Program and arguments. As root it begins as root without a user namespace, with no capability but those to
        change its user id: it must do that (``setpriv``, or a program of ours) before it runs any code of the agent.
    shared_memory_bytes
        Size of ``/dev/shm``; what it holds counts as memory.
    uid, gid
        The user inside, where there is a user namespace.
    capabilities
        What the command may do in its user namespace; the calls that change owners then always succeed.
    network
        Whether it uses the network of this machine.
    processes_shown
        Whether it has a ``/proc``, with its own processes.

    The environment is not here: bubblewrap hands on its own, which the caller gives to the process that it starts.
    """

    root: tuple[str, ...]
    writable: tuple[str, ...]
    folder: str
    command: tuple[str, ...]
    shared_memory_bytes: int
    uid: int = 1000
    gid: int = 1000
    capabilities: tuple[str, ...] = ()
    read_only: bool = True
    network: bool = False
    processes_shown: bool = True


@dataclass(frozen=True, slots=True)
class Enclosed:
    """A command line, and the open files that its process must inherit."""

    argv: tuple[str, ...]
    pass_fds: tuple[int, ...]


@contextmanager
def enclosed(program: str, inside: Inside, *, user_namespace: bool) -> Iterator[Enclosed]:
    """How to start a command behind bubblewrap, once; the files are open until the context is left.

    Parameters
    ----------
    program
        Path of ``bwrap``.
    user_namespace
        False needs root: the command changes to a user id of its own, so that the kernel limits its processes.
    """
    arguments = [program, "--die-with-parent", "--hostname", "sandbox"]
    arguments += ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += [] if inside.network else ["--unshare-net"]
    if user_namespace:
        arguments += ["--unshare-user", "--uid", str(inside.uid), "--gid", str(inside.gid), "--cap-drop", "ALL"]
        for each in inside.capabilities:
            arguments += ["--cap-add", each]
    else:
        arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    arguments += inside.root
    arguments += ["--proc", "/proc"] if inside.processes_shown else []
    # The devices are a tmpfs, which a user could fill: it is read-only, but for the shared memory in it.
    arguments += ["--dev", "/dev", "--perms", "1777", "--size", str(inside.shared_memory_bytes)]
    arguments += ["--tmpfs", SHARED_MEMORY, "--remount-ro", "/dev"]
    arguments += [*inside.writable, *(("--remount-ro", "/") if inside.read_only else ()), "--chdir", inside.folder]
    with filter_fd(one_owner=bool(inside.capabilities)) as calls:
        filtered = () if calls is None else ("--seccomp", str(calls))
        yield Enclosed((*arguments, *filtered, "--", *inside.command), () if calls is None else (calls,))
