"""Control groups of actions: cores, memory and number of processes that the kernel itself enforces.

Version 1 has a tree of groups for each controller, version 2 one tree for all. Either is used only where this process
may make groups below its own and move processes there; nothing is changed outside of the groups that are made here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from heddle_dask.isolation import process_tree

CONTROLLERS = ("cpuset", "memory", "pids")
# Environment variable of a tool worker: a directory of cgroup v2 that was delegated to this user.
CGROUP_VARIABLE = "HEDDLE_CGROUP"
_PREFIX = "heddle-"
_LONGEST_S = 10.0
_PAUSE_S = 0.001
# Of this process: several tool workers may run in one.
_trees = itertools.count()


@dataclass(frozen=True, slots=True)
class FoundCgroups:
    """The groups of this process.

    Attributes
    ----------
    version
        1 or 2; 0: there are none.
    folders
        Folder of the group by controller.
    """

    version: int = 0
    folders: Mapping[str, Path] = field(default_factory=dict)


def find_cgroups(proc: Path = Path("/proc/self"), delegated: str | None = None) -> FoundCgroups:
    """The groups of this process by controller, whether or not they can be changed.

    Parameters
    ----------
    delegated
        A directory of cgroup v2 in place of the own one.
    """
    if delegated:
        folder = Path(delegated)
        return FoundCgroups(2, dict.fromkeys(_words(folder / "cgroup.controllers"), folder))
    try:
        own = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = [line.split() for line in (proc / "mountinfo").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return FoundCgroups()
    paths = {name: path for _, names, path in (line.split(":", 2) for line in own) for name in names.split(",")}
    first: dict[str, Path] = {}
    unified: Path | None = None
    for mount in mounts:
        separator = mount.index("-")
        root, place, kind, options = mount[3], mount[4], mount[separator + 1], mount[-1].split(",")
        if kind == "cgroup2" and unified is None:
            unified = _inside(root, place, paths.get("", "/"))
        elif kind == "cgroup":
            for name in {*CONTROLLERS}.intersection(options).intersection(paths) - first.keys():
                first[name] = _inside(root, place, paths[name])
    if first:
        return FoundCgroups(1, first)
    if unified is None:
        return FoundCgroups()
    return FoundCgroups(2, dict.fromkeys(_words(unified / "cgroup.controllers"), unified))


def _inside(root: str, place: str, path: str) -> Path:
    """Folder of a group under a mount that shows the tree from `root` on."""
    inner = path[len(root) :] if root != "/" and path.startswith(root) else path
    return Path(place) / inner.lstrip("/")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


class Cgroup:
    """A group of processes, with the controllers that could be had.

    Attributes
    ----------
    folders
        Its folder by controller; with version 2 they are one.
    """

    def __init__(self, version: int, folders: Mapping[str, Path]) -> None:
        self.version = version
        self.folders = dict(folders)
        self._cores: tuple[int, ...] = ()
        self._counted = (0, 0)

    @property
    def join_files(self) -> tuple[str, ...]:
        """Files to which a process writes ``0`` to join."""
        return tuple(str(folder / "cgroup.procs") for folder in dict.fromkeys(self.folders.values()))

    def add(self, pid: int) -> None:
        """Move a process here; what it starts from then on is here too. One that has ended is left out."""
        for path in self.join_files:
            with contextlib.suppress(ProcessLookupError):
                _write(Path(path), str(pid))

    def set_cores(self, cores: Collection[int]) -> None:
        wanted = tuple(cores)
        if "cpuset" in self.folders and wanted and wanted != self._cores:
            _write(self.folders["cpuset"] / "cpuset.cpus", ",".join(map(str, wanted)))
            self._cores = wanted

    def set_memory(self, memory_bytes: int) -> None:
        """Limit their memory together, swap included."""
        folder = self.folders.get("memory")
        if folder is None:
            return
        if self.version == 2:
            _write(folder / "memory.max", str(memory_bytes))
            _write_if_there(folder / "memory.swap.max", "0")
            _write_if_there(folder / "memory.oom.group", "1")
        else:
            _write(folder / "memory.limit_in_bytes", str(memory_bytes))
            _write_if_there(folder / "memory.memsw.limit_in_bytes", str(memory_bytes))

    def set_processes(self, most: int) -> None:
        """Limit the number of their processes and threads together."""
        if "pids" in self.folders:
            _write(self.folders["pids"] / "pids.max", str(most))

    def out_of_memory(self) -> int:
        """How often the kernel has killed one of them for memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return self._count("memory", name, "oom_kill") or self._counted[0]

    def forks_refused(self) -> int:
        """How often one of them could not start a process or a thread."""
        return self._count("pids", "pids.events", "max") or self._counted[1]

    def _count(self, controller: str, name: str, key: str) -> int:
        folder = self.folders.get(controller)
        words = [] if folder is None else _words(folder / name)
        return next((int(value) for each, value in itertools.pairwise(words) if each == key), 0)

    def pids(self) -> list[int]:
        folder = next(iter(self.folders.values()))
        return [int(word) for word in _words(folder / "cgroup.procs")]

    def kill(self) -> bool:
        """Kill all processes, and what they start meanwhile; False where some are left after ten seconds."""
        with contextlib.suppress(OSError):
            self.set_processes(0)
        deadline_s = time.monotonic() + _LONGEST_S
        while pids := self.pids():
            if not self._kill_at_once():
                process_tree.kill_all(pids)
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_PAUSE_S)
        return True

    def _kill_at_once(self) -> bool:
        if self.version != 2:
            return False
        return _write_if_there(next(iter(self.folders.values())) / "cgroup.kill", "1")

    def remove(self) -> bool:
        """Remove the group; False while a process is still there. What was counted can still be read."""
        self._counted = (self.out_of_memory(), self.forks_refused())
        for name, folder in list(self.folders.items()):
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return False
            del self.folders[name]
        return True


class CgroupTree:
    """The groups that one tool worker makes below its own.

    Use `open`. The folder names the worker's process, so that a later one can remove what a killed worker has left.
    """

    def __init__(self, version: int, folders: Mapping[str, Path]) -> None:
        self.version = version
        self.folders = dict(folders)
        self._number = 0
        self._to_remove: list[Cgroup] = []

    @classmethod
    def open(cls, found: FoundCgroups, cores: Collection[int]) -> CgroupTree | None:
        """The groups that can be made here; None where there are none.

        Each controller is tried by making a group and moving a process of ours there and back.

        Parameters
        ----------
        cores
            Those of the worker, on which all its actions run.
        """
        folders = {}
        own = (os.getpid(), process_tree.start_of(os.getpid()), _pid_namespace(), next(_trees))
        name = _PREFIX + "-".join(map(str, own))
        for controller in CONTROLLERS:
            folder = found.folders.get(controller)
            if folder is not None and (made := _try(found.version, controller, folder, name, cores)) is not None:
                folders[controller] = made
        return cls(found.version, folders) if folders else None

    def make(self) -> Cgroup:
        """A group for the processes of one action at a time."""
        self.clear()
        self._number += 1
        folders = {name: folder / f"a{self._number}" for name, folder in self.folders.items()}
        for folder in dict.fromkeys(folders.values()):
            folder.mkdir()
        if self.version == 1 and "cpuset" in folders:
            _copy_cpuset(self.folders["cpuset"], folders["cpuset"])
        return Cgroup(self.version, folders)

    def discard(self, group: Cgroup) -> None:
        """Remove a group as soon as its processes have ended."""
        if not group.remove():
            self._to_remove.append(group)

    def clear(self) -> None:
        """Remove the discarded groups whose processes have ended meanwhile."""
        self._to_remove = [group for group in self._to_remove if not group.remove()]

    def close(self) -> None:
        """Kill what is left, and remove all groups."""
        for place in dict.fromkeys(self.folders.values()):
            _remove_tree(self.version, place)


def _try(version: int, controller: str, own: Path, name: str, cores: Collection[int]) -> Path | None:
    """The worker's folder for one controller, made below its own group; None where that is not possible."""
    remove_stale(version, own)
    place = own / name
    try:
        if version == 2 and controller not in _words(own / "cgroup.subtree_control"):
            if _words(own / "cgroup.procs"):
                return None  # not delegated: how its processes are counted is for others to say
            _write(own / "cgroup.subtree_control", f"+{controller}")
        place.mkdir(exist_ok=True)
        if version == 2:
            _write(place / "cgroup.subtree_control", f"+{controller}")
        elif controller == "cpuset":
            _copy_cpuset(own, place)
            _write(place / "cpuset.cpus", ",".join(map(str, cores)))
        _probe(place, controller, version)
    except OSError:
        if version == 1:  # with version 2 another controller may use it
            with contextlib.suppress(OSError):
                place.rmdir()
        return None
    return place


def _probe(place: Path, controller: str, version: int) -> None:
    """Let a process of ours join a group below `place`."""
    leaf = place / "probe"
    leaf.mkdir()
    try:
        if version == 1 and controller == "cpuset":
            _copy_cpuset(place, leaf)
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", f'echo 0 > "{leaf}/cgroup.procs"'], os.environ)
        if os.waitpid(pid, 0)[1] != 0:
            raise PermissionError(f"no process can join {leaf}")
    finally:
        _remove_soon(leaf)


def _remove_soon(folder: Path) -> None:
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(_PAUSE_S)


def _copy_cpuset(upper: Path, place: Path) -> None:
    """Version 1 starts with no cores and no memory nodes, and refuses processes until it has some."""
    for name in ("cpuset.mems", "cpuset.cpus"):
        _write(place / name, (upper / name).read_text(encoding="ascii").strip())
    # The scheduling domains of the machine stay as they are: changing them takes milliseconds.
    _write_if_there(place / "cpuset.sched_load_balance", "0")


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def remove_stale(version: int, own: Path) -> None:
    """Kill and remove what workers of ours that have ended left below this group."""
    for place in _folders(own):
        parts = place.name.removeprefix(_PREFIX).split("-")
        if not place.name.startswith(_PREFIX) or len(parts) != 4 or not all(map(str.isdigit, parts)):
            continue
        pid, started, namespace, _ = map(int, parts)
        # In another namespace the pid is that of another process, or of none.
        if namespace == _pid_namespace() and process_tree.start_of(pid) != started:
            _remove_tree(version, place)


def _remove_tree(version: int, place: Path) -> None:
    for leaf in [*_folders(place), place]:
        group = Cgroup(version, {"": leaf})
        group.kill()
        with contextlib.suppress(OSError):
            leaf.rmdir()


def _folders(place: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from [each for each in place.iterdir() if each.is_dir()]


def _write(path: Path, text: str) -> None:
    # Not `write_text`, which would make a file: these exist, and one write is one order.
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def _write_if_there(path: Path, text: str) -> bool:
    try:
        _write(path, text)
    except OSError:
        return False
    return True
