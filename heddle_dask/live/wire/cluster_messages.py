"""Messages about a cluster: of the object that submits its jobs, of workers that will leave, of those who watch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heddle_dask.core.resources import PoolMaximum
from heddle_dask.live.wire.codec import Message, Request, WireValue


@dataclass(frozen=True, slots=True)
class WorkerLoad(WireValue):
    """What would be lost if a worker closed now."""

    name: str
    serves: bool  # whether its engine answers, or it takes actions
    busy: int = 0  # steps, actions and other tasks that run or wait there
    # `residents`, `resident_tokens`: trajectories whose context is there, and its tokens.
    residents: int = 0
    resident_tokens: int = 0
    results: int = 0  # results there that a client still needs
    trouble: str = ""  # why its engine did not start, as long as it has not
    drains: bool = False  # whether it has been asked to leave

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost."""
        return not (self.busy or self.residents or self.results)


@dataclass(frozen=True, slots=True)
class Demand(Message):
    """The work that the scheduler plugin sees, and what there is for it."""

    session_open: bool  # whether a driver has a session: it needs an engine and a tool worker to begin
    trajectories: int = 0  # trajectories that have not ended, those that wait for admission included
    open_tokens: float = 0.0  # tokens that these will still generate
    # The part of `open_tokens` of trajectories that wait for admission or for an engine.
    waiting_tokens: float = 0.0
    sampled_tokens: int = 0  # tokens generated so far in this session
    generating: int = 0  # engines on which a step runs now
    # `engines`, `slots`: engines that take steps, and their slots together.
    engines: int = 0
    slots: int = 0
    idle_engines: int = 0  # those of them that have had no trajectory for a while
    # `waiting_tool_cpus`, `waiting_tool_cpu_s`: CPUs that waiting actions need at least, all together, and these times
    # the expected seconds of each.
    waiting_tool_cpus: int = 0
    waiting_tool_cpu_s: float = 0.0
    # `busy_tool_cpus`, `tool_cpus`: CPUs of running actions, and of all tool workers.
    busy_tool_cpus: int = 0
    tool_cpus: int = 0
    workers: tuple[WorkerLoad, ...] = ()  # every Dask worker that has joined


@dataclass(frozen=True, slots=True)
class QueuedCapacity(WireValue):
    """What the cluster's jobs that have not joined will bring."""

    # `engines`, `tool_workers`: number of rollout workers and of tool workers in jobs that wait in a queue which may
    # let them start.
    engines: int = 0
    tool_workers: int = 0
    # `starting_engines`, `starting_tool_workers`: the same in jobs that run and have not joined; the cluster object
    # replaces those that take too long.
    starting_engines: int = 0
    starting_tool_workers: int = 0
    # Engines with which a rollout may begin; more may join later. 0: there is no such cluster object.
    engines_to_begin: int = 0
    trouble: str = ""  # why the latest job failed, in one line; empty while none has
    next_job_s: float = 0.0  # seconds until a job with engines is submitted; 0: nothing delays one

    @property
    def engines_told(self) -> str:
        """Where the engines are that will come; empty where none is known to."""
        if self.engines or self.starting_engines:
            return in_jobs(self.engines, self.starting_engines)
        return f"next job in {self.next_job_s:.0f} s" if self.next_job_s else ""


def in_jobs(queued: int, starting: int) -> str:
    """So many workers are in jobs that queue, and in jobs that start."""
    numbers = ((queued, "queue"), (starting, "start"))
    return ", ".join(f"{number} in jobs that {do}" for number, do in numbers if number)


@dataclass(frozen=True, slots=True)
class ExchangeDemand(Request[Demand]):
    """The cluster tells what it has queued, and asks for the demand."""

    queued: QueuedCapacity
    # After so many seconds without another such message the queue counts as empty: the cluster object is gone.
    valid_s: float
    maxima: tuple[PoolMaximum, ...] = ()  # the largest workers for actions that its jobs will ever start


# -- workers that will leave -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrainedWorkers(Message):
    """Workers that have left without a loss, and those that still had work when their time was over; by name."""

    drained: tuple[str, ...]
    late: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainWorkers(Request[DrainedWorkers]):
    """Give these workers no new work, move away what they hold, and then have them leave.

    Answered when all have left, or when their time is over. The same workers may be named again, with less time.
    """

    names: tuple[str, ...]  # names of workers; those that no worker has are taken to have left
    ends_in_s: float  # seconds from now in which they must have left


# -- those who watch a cluster: terminals and tests, without a session --------------------------------


@dataclass(frozen=True, slots=True)
class CurrentSnapshot(Message):
    """A picture of the cluster and its latest session, as `views.run_snapshot.RunSnapshot.as_json`."""

    snapshot: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GetSnapshot(Request[CurrentSnapshot]):
    """What does a person see of the cluster now? Without prompts and tokens; `run`: of one run, by name or session."""

    run: str = ""
