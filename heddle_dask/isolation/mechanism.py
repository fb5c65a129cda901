"""By what means the actions of a tool worker are kept apart, in words for people."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from heddle_dask.isolation.cgroups import CgroupTree

_AFFINITY = "scheduler affinity"
_WATCHED = "watching"
_RLIMIT = "a limit of the user's processes"


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What enforces the cores, the memory and the number of processes of an action.

    Attributes
    ----------
    cores, memory, processes
        ``"cgroup v2"``, ``"cgroup v1"``, or what stands in for it.
    shared_because
        Why actions have no cores of their own; empty: they have.
    """

    cores: str
    memory: str
    processes: str
    shared_because: str = ""

    @classmethod
    def of(cls, groups: CgroupTree | None, shared_because: str = "") -> Mechanism:
        has: Collection[str] = () if groups is None else groups.folders
        name = "" if groups is None else f"cgroup v{groups.version}"
        return cls(
            name if "cpuset" in has else _AFFINITY,
            name if "memory" in has else _WATCHED,
            name if "pids" in has else (_WATCHED if os.geteuid() == 0 else _RLIMIT),
            shared_because,
        )

    @property
    def text(self) -> str:
        means: dict[str, list[str]] = {}
        for what, by in (("cores", self.cores), ("memory", self.memory), ("processes", self.processes)):
            if what == "cores" and self.shared_because:
                by = "nothing"
            means.setdefault(by, []).append(what)
        return "; ".join(f"{', '.join(kept)} by {by}" for by, kept in means.items())

    @property
    def weaker(self) -> str:
        """One line where actions are not kept apart as they ask; empty: they are.

        Scheduler affinity and watching hold against programs that do not try to get around them.
        """
        if self.shared_because:
            return f"actions share cores: {self.shared_because} (control path only, times mean nothing)"
        return ""
