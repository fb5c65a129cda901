"""Messages about workers that will leave: of a job or a cluster to the scheduler plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from heddle_dask.live.wire.codec import Message, Request


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
