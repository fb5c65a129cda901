"""Messages of workers: to and from the scheduler plugin, the driver and one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from heddle_dask.core.commands import LoadService, MoveContext
from heddle_dask.core.ids import ActionId, TrajectoryId
from heddle_dask.core.nouns import EngineDescription, HostDescription
from heddle_dask.live.wire.codec import Message, Request
from heddle_dask.live.wire.transport import Done

# -- worker to scheduler: engines and hosts --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineWorkerReport(Message):
    """A worker waits for an order which engine to host, or for GPUs of the engine that it wants to host."""

    name: str
    node: str  # host name of its machine
    units: int  # GPUs that it brings, where it does not name them
    gpus: tuple[str, ...] = ()  # the GPUs that it sees, by name
    # The engine that it wants to host, as `EngineSpec.to_mapping` gives it; None: whatever it is ordered to host.
    wants: Mapping[str, Any] | None = None


GpuHolder = Literal["engine", "trainer", "services"]
"""For what a worker has GPUs."""


@dataclass(frozen=True, slots=True)
class GpusReturnedReport(Message):
    """The plugin of a worker has ended, or what it ran: it uses no GPUs any more."""

    holder: GpuHolder = "engine"


@dataclass(frozen=True, slots=True)
class GpusTaken(Message):
    """The GPUs that a worker may use, by name."""

    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TakeGpus(Request[GpusTaken]):
    """Give a worker GPUs for its trainer or its model services, in place of those that it had for them."""

    asker: str  # the address of the worker
    name: str
    node: str  # host name of its machine
    gpus: tuple[str, ...]  # those that it sees
    count: int
    holder: GpuHolder


@dataclass(frozen=True, slots=True)
class EngineReadyReport(Message):
    """An engine on this worker answers; a new incarnation has a new id."""

    engine: EngineDescription
    # `kind`, `model`: as in its `EngineSpec`.
    kind: str
    model: str
    start_s: float = 0.0  # seconds that its start took; 0 when it was not measured
    logprobs: str = "raw"  # which logprobs its steps return (`EngineKind.logprobs`)


@dataclass(frozen=True, slots=True)
class EngineStartingReport(Message):
    """What the engine that starts on this worker is doing."""

    phase: str


@dataclass(frozen=True, slots=True)
class EngineStartFailedReport(Message):
    """An engine did not start; the worker tries again."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostReadyReport(Message):
    """A worker takes actions."""

    host: HostDescription
    isolation: str = ""  # by what means it keeps actions apart
    weaker: str = ""  # why that is less than actions ask for; empty: it is not


@dataclass(frozen=True, slots=True)
class SilenceReport(Message):
    """Something that this worker has work wait for is silent, or answers again: a line for the user.

    An engine, a model service, or a sandbox service, of which several workers may tell the same.
    """

    line: str


@dataclass(frozen=True, slots=True)
class ActionPayloadWantedReport(Message):
    """An action has started whose payload did not come with it: the driver is to send it to this worker."""

    session: str
    action_id: ActionId


# -- scheduler to worker ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostEngine(Request[Done]):
    """End the engine of this worker; then start the one of `spec` (`EngineSpec.to_mapping`), unless that is None.

    Answered when the old engine has ended.
    """

    spec: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class MoveContextOrder(Message):
    """Bring a trajectory's context, and its KV cache, from another worker to the engine of this one."""

    session: str
    command: MoveContext
    source: str  # address of that worker; empty when it has gone


@dataclass(frozen=True, slots=True)
class LoadServiceOrder(Message):
    """Make a copy of a model service resident."""

    session: str
    command: LoadService
    spec: Mapping[str, Any]  # the service (`ServiceSpec.to_mapping`)


@dataclass(frozen=True, slots=True)
class ClearServicesOrder(Message):
    """End all copies of all services: their session has ended."""


# -- worker to worker ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ContextTokens(Message):
    """The context that the worker held; None when it held none."""

    token_ids: bytes | None


@dataclass(frozen=True, slots=True)
class TakeContext(Request[ContextTokens]):
    """Hand over the context of a trajectory whose step runs elsewhere now."""

    session: str
    trajectory_id: TrajectoryId


@dataclass(frozen=True, slots=True)
class ExportedContext(Message):
    """A context, and where its KV cache can be read (`KvHandle.to_mapping`); or the `cause` why there is none."""

    token_ids: bytes = b""
    handle: Mapping[str, Any] | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ExportContext(Request[ExportedContext]):
    """Copy the context of a trajectory, and export its KV cache if `transfer`."""

    session: str
    trajectory_id: TrajectoryId
    transfer: bool


# -- driver to worker ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutActionPayload(Request[Done]):
    """The long payload that a running action waits for."""

    session: str
    action_id: ActionId
    payload: bytes
