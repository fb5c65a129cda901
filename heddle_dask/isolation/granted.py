"""What the running action was granted, for everything that starts a process on its behalf."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.resources import IDLE_NICE

CPUS_VARIABLE = "HEDDLE_CPUS"
# Read by numeric libraries when they are loaded; the last by Python 3.13 and later (`os.cpu_count`).
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "PYTHON_CPU_COUNT",
)


@dataclass(frozen=True, slots=True)
class Granted:
    """What one action may use while it runs.

    Attributes
    ----------
    cpus
        Number of its CPUs; 0 for an action that only waits.
    cores
        The CPUs of the machine on which it runs; empty where it shares those of its worker.
    memory_bytes
        Limit of its memory; 0: none.
    own_cores
        Those of the cores that no other action has.
    nice
        Not 0: the others are lent, and the actions that have them go first (`RunAction.nice`).
    adopt
        Takes the pid of a process that was started for the action, and holds it to the limits of the action.
    use
        Takes tokens and cost that its call of an API has used (`report_use`); what is below 0 is not said.
    """

    cpus: int = 1
    cores: tuple[int, ...] = ()
    own_cores: tuple[int, ...] = ()
    memory_bytes: int = 0
    nice: int = 0
    adopt: Callable[[int], None] = field(default=lambda pid: None, repr=False, compare=False)
    use: Callable[[int, float], None] = field(default=lambda tokens, cost: None, repr=False, compare=False)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables for the processes of the action: its number of CPUs, also for numeric libraries."""
        return cpu_variables(self.cpus)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Processes that this thread starts inside run on the cores of the action alone, and all that they start.

        The thread itself is there only as long; it must not wait inside.
        """
        if not self.cores:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


_running: ContextVar[Granted | None] = ContextVar("heddle_granted", default=None)


def granted() -> Granted | None:
    """What the running action was granted; None outside of an action."""
    return _running.get()


def report_use(tokens: int | None = None, cost: float | None = None) -> None:
    """Say in a tool what its call of an API has used: that counts in the quota in place of what `Needs` declares.

    What is None is not said. Several reports of one action add up. `http_call` reports the tokens of replies in
    OpenAI's form by itself.

    Raises
    ------
    BadInput
        They are no such numbers.
    """
    for said in (tokens, cost):
        if said is not None and not (is_finite(said) and 0 <= said < 2**40 and (said is cost or type(said) is int)):
            raise BadInput(f"report_use: tokens is {tokens!r}, cost is {cost!r}: use numbers from 0 to 2**40, or None")
    if (given := granted()) is not None:
        given.use(-1 if tokens is None else tokens, -1.0 if cost is None else cost)


@contextmanager
def running_with(given: Granted) -> Iterator[None]:
    """Let `granted` return `given` inside, also in tasks that are made there."""
    token = _running.set(given)
    try:
        yield
    finally:
        _running.reset(token)


def cpu_variables(cpus: int) -> dict[str, str]:
    """Environment variables that tell a program its number of CPUs: ``HEDDLE_CPUS``, and those of numeric libraries."""
    return {CPUS_VARIABLE: str(cpus), **dict.fromkeys(THREAD_VARIABLES, str(max(1, cpus)))}


def yield_cpus(pid: int, nice: int) -> None:
    """Let a process, and all that it starts, use cores after processes of usual priority.

    Its nice value counts within its session alone where the kernel groups sessions (sched(7), "The autogroup feature"):
    there the session has the same value.
    """
    level = min(nice, IDLE_NICE - 1)
    with contextlib.suppress(OSError):  # it has ended, or one of its threads
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), level)
            if nice == IDLE_NICE:
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        if os.getsid(pid) == pid:
            Path(f"/proc/{pid}/autogroup").write_text(str(level), encoding="ascii")
