"""A call that runs on a tool worker: what it may use, where it can be found, and the limit that ended it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from heddle_dask.isolation.cgroups import Cgroup
from heddle_dask.live.worker.call_terms import CallTerms

LimitCause = Literal["memory", "disk", "processes"]

_MIB = 1 << 20


class LimitExceeded(Exception):
    """A call used more than it may; the message is one line."""

    def __init__(self, cause: LimitCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause  # the limit


def _nothing() -> None:
    """The call does not run: there is nothing to kill."""


@dataclass(slots=True, eq=False)
class RunningCall:
    terms: CallTerms = field(default_factory=CallTerms)  # what its process sets for itself
    cores: tuple[int, ...] = ()  # the cores that are its alone; empty: it shares those of its worker
    memory_bytes: int = 0  # limit of the memory of all its processes; 0: none
    most_processes: int = 1024  # limit of its processes and threads
    # `scratch`, `most_scratch_bytes`: its directory for temporary files, and the limit of what is there.
    scratch: str = ""
    most_scratch_bytes: int = 10 << 30
    pid: Callable[[], int] | None = None  # of its process; 0 while it is not known
    group: Cgroup | None = None  # its control group; None where it has none
    kill: Callable[[], None] = _nothing  # kills its process with everything below it
    use: Callable[[int, float], None] = lambda tokens, cost: None  # takes what it has used of its API
    printed: str = ""  # the end of what it has printed; set when it has ended
    exceeded: LimitExceeded | None = None  # the limit for which it was killed; None: it was not

    def running(self, pid: Callable[[], int] | None, group: Cgroup | None, kill: Callable[[], None]) -> None:
        """Its process has begun, or has ended (None)."""
        self.pid, self.group, self.kill = pid, group, kill

    def exceed(self, cause: LimitCause) -> None:
        """It uses more than it may: kill it."""
        if self.exceeded is None:
            self.exceeded = self._limit(cause)
            self.kill()

    def limit_behind(self, error: Exception) -> LimitExceeded | None:
        """The limit that made the call fail; None: it failed by itself."""
        if self.exceeded is not None:
            return self.exceeded
        if self.group is not None and self.memory_bytes and self.group.out_of_memory():
            return self._limit("memory")
        if self.group is not None and self.group.forks_refused():
            return self._limit("processes")
        limits: tuple[LimitCause, ...] = get_args(LimitCause)
        cause = next((limit for limit in limits if limit == getattr(error, "cause", "")), None)
        return None if cause is None else self._limit(cause)

    def _limit(self, cause: LimitCause) -> LimitExceeded:
        text: dict[LimitCause, str] = {
            "memory": f"it used more than its {self.memory_bytes / _MIB:,.0f} MiB of memory",
            "disk": f"it filled its disk: {self.most_scratch_bytes / _MIB:,.0f} MiB in its scratch directory, or in a "
            "file (Budget.max_action_disk_bytes)",
            "processes": f"it had more than {self.most_processes} processes and threads (Budget.max_action_processes)",
        }
        return LimitExceeded(cause, text[cause])
