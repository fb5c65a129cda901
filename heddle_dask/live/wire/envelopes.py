"""Commands and events of the controller on their way: each crosses as itself, with the session that it is of.

A new command or event that workers or drivers carry out or report is named here once, and nowhere copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, get_args

from heddle_dask.core import commands as cmd
from heddle_dask.core import events as ev
from heddle_dask.live.wire.codec import OP, Message, from_mapping, to_mapping

UNSTAMPED: Final = 0.0
"""Time of an event that is under way: the scheduler, which has the clock of the session, stamps it."""

Ordered = (
    cmd.AbortStep
    | cmd.AbortAction
    | cmd.DropContext
    | cmd.CloseSandbox
    | cmd.EvictService
    | cmd.DropServiceCopy
    | cmd.FetchWeights
    | cmd.InstallWeights
)

Reported = (
    # Of workers, beside what comes with a result (`results.ResultReport`).
    ev.StepStarted
    | ev.ActionFinished
    | ev.MoveEnded
    | ev.EngineLost
    | ev.HostLost
    | ev.ServiceLoaded
    | ev.ServiceEvicted
    | ev.ServiceLost
    | ev.WeightsFetched
    | ev.WeightsInstalled
    # Of drivers.
    | ev.TrajectoryForked
    | ev.StepCancelled
    | ev.ActionCancelled
    | ev.SandboxClosed
    | ev.ProgramEnded
    | ev.OptimizerStepEnded
    | ev.WeightsPublished
    | ev.SwitchRequested
    | ev.GroupEnded
    | ev.TrajectoryRedundant
)


class Envelope(Message):
    """A message whose operation names what is in it: each kind has a handler of its own."""

    __slots__ = ()

    content: ClassVar[str]
    kinds: ClassVar[Mapping[str, type]]
    session: str

    @classmethod
    def operation(cls, kind: type) -> str:
        """The operation of an envelope with such a command or event."""
        return f"{cls.op}-{kind.__name__}"

    def to_wire(self) -> dict[str, Any]:
        content = getattr(self, self.content)
        return {OP: self.operation(type(content)), "session": self.session, self.content: to_mapping(content)}

    @classmethod
    def from_wire(cls, mapping: Mapping[str, Any]) -> Self:
        """See `WireValue.from_wire`; a KeyError says that the command or event is unknown."""
        values = dict(mapping)
        kind = cls.kinds[values.pop(OP)]
        values[cls.content] = from_mapping(kind, values[cls.content])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Order(Envelope):
    """Scheduler to worker: carry out this command."""

    content: ClassVar[str] = "command"

    # In whose names the command is; empty for weights: an engine keeps them from one session to the next.
    session: str
    command: Ordered


@dataclass(frozen=True, slots=True)
class Report(Envelope):
    """Worker or driver to scheduler: this has happened.

    Reports about steps and actions are sent before Dask's own message that the task is done, on the same stream.
    """

    content: ClassVar[str] = "event"

    # In whose names the event is; of a model service, that of its order: one of an earlier session says nothing about
    # the present one. Empty for engines, hosts and weights, which are no session's own.
    session: str
    event: Reported  # not stamped (`UNSTAMPED`)


Order.kinds = {Order.operation(kind): kind for kind in get_args(Ordered)}
Report.kinds = {Report.operation(kind): kind for kind in get_args(Reported)}
