"""Messages about a cluster: of the object that submits its jobs, of workers that will leave, of those who watch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from heddle_dask.core.resources import PoolMaximum
from heddle_dask.live.wire.codec import Message, Request, WireValue


@dataclass(frozen=True, slots=True)
class WorkerLoad(WireValue):
    """What would be lost if a worker closed now.

    Attributes
    ----------
    serves
        Whether its engine answers, or it takes actions.
    drains
        Whether it has been asked to leave.
    busy
        Steps, actions and other tasks that run or wait there.
    residents, resident_tokens
        Trajectories whose context is there, and its tokens.
    results
        Results there that a client still needs.
    trouble
        Why its engine did not start, as long as it has not.
    """

    name: str
    serves: bool
    busy: int = 0
    residents: int = 0
    resident_tokens: int = 0
    results: int = 0
    trouble: str = ""
    drains: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing would be lost."""
        return not (self.busy or self.residents or self.results)


@dataclass(frozen=True, slots=True)
class Demand(Message):
    """The work that the scheduler plugin sees, and what there is for it.

    Attributes
    ----------
    session_open
        Whether a driver has a session: it needs an engine and a tool worker to begin.
    trajectories
        Trajectories that have not ended, those that wait for admission included.
    open_tokens
        Tokens that these will still generate.
    waiting_tokens
        The part of `open_tokens` of trajectories that wait for admission or for an engine.
    sampled_tokens
        Tokens generated so far in this session.
    generating
        Engines on which a step runs now.
    engines, slots
        Engines that take steps, and their slots together.
    waiting_tool_cpus, waiting_tool_cpu_s
        CPUs that waiting actions need at least, all together, and these times the expected seconds of each.
    busy_tool_cpus, tool_cpus
        CPUs of running actions, and of all tool workers.
    workers
        Every Dask worker that has joined.
    """

    op: ClassVar[str] = "heddle_demand"

    session_open: bool
    trajectories: int = 0
    open_tokens: float = 0.0
    waiting_tokens: float = 0.0
    sampled_tokens: int = 0
    generating: int = 0
    engines: int = 0
    slots: int = 0
    waiting_tool_cpus: int = 0
    waiting_tool_cpu_s: float = 0.0
    busy_tool_cpus: int = 0
    tool_cpus: int = 0
    workers: tuple[WorkerLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class QueuedCapacity(WireValue):
    """What the cluster's jobs that have not joined will bring.

    Attributes
    ----------
    engines, tool_workers
        Number of rollout workers and of tool workers in jobs that wait in a queue which may let them start.
    starting_engines, starting_tool_workers
        The same in jobs that run and have not joined; the cluster object replaces those that take too long.
    engines_to_begin
        Engines with which a rollout may begin; more may join later. 0: there is no such cluster object.
    trouble
        Why the latest job failed, in one line; empty while none has.
    """

    engines: int = 0
    tool_workers: int = 0
    starting_engines: int = 0
    starting_tool_workers: int = 0
    engines_to_begin: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class ExchangeDemand(Request[Demand]):
    """The cluster tells what it has queued, and asks for the demand.

    Attributes
    ----------
    valid_s
        After so many seconds without another such message the queue counts as empty: the cluster object is gone.
    maxima
        The largest workers for actions that its jobs will ever start.
    """

    op: ClassVar[str] = "heddle_exchange_demand"

    queued: QueuedCapacity
    valid_s: float
    maxima: tuple[PoolMaximum, ...] = ()


# -- workers that will leave -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrainedWorkers(Message):
    """Workers that have left without a loss, and those that still had work when their time was over; by name."""

    op: ClassVar[str] = "heddle_drained_workers"

    drained: tuple[str, ...]
    late: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainWorkers(Request[DrainedWorkers]):
    """Give these workers no new work, move away what they hold, and then have them leave.

    Answered when all have left, or when their time is over. The same workers may be named again, with less time.

    Attributes
    ----------
    names
        Names of workers; those that no worker has are taken to have left.
    ends_in_s
        Seconds from now in which they must have left.
    """

    op: ClassVar[str] = "heddle_drain_workers"

    names: tuple[str, ...]
    ends_in_s: float


# -- those who watch a cluster: terminals and tests, without a session --------------------------------


@dataclass(frozen=True, slots=True)
class CurrentSnapshot(Message):
    """A picture of the cluster and its latest session, as `views.run_snapshot.RunSnapshot.as_json`."""

    op: ClassVar[str] = "heddle_snapshot"

    snapshot: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GetSnapshot(Request[CurrentSnapshot]):
    """What does a person see of the cluster now? Without prompts and tokens."""

    op: ClassVar[str] = "heddle_get_snapshot"
