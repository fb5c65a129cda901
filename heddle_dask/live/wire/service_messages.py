"""Messages about model services: orders of the scheduler to their hosts, and reports of the hosts.

A chunk is `gpus` GPUs of the host from `first_gpu` on. A report names the session whose order it answers: one of an
earlier session says nothing about the present one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from heddle_dask.core.ids import HostId
from heddle_dask.live.wire.codec import Message

# -- scheduler to worker ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadServiceOrder(Message):
    """Make a copy of a service resident on a chunk; as `core.commands.LoadService`.

    Attributes
    ----------
    spec
        The service (`ServiceSpec.to_mapping`).
    """

    op: ClassVar[str] = "heddle-load-service"

    session: str
    spec: Mapping[str, Any]
    first_gpu: int
    gpus: int
    cold: bool
    keep: bool


@dataclass(frozen=True, slots=True)
class EvictServiceOrder(Message):
    """Free the GPU memory of a copy."""

    op: ClassVar[str] = "heddle-evict-service"

    session: str
    service: str
    first_gpu: int
    gpus: int


@dataclass(frozen=True, slots=True)
class DropServiceCopyOrder(Message):
    """Free the copy in host memory of a service for this number of GPUs."""

    op: ClassVar[str] = "heddle-drop-service-copy"

    session: str
    service: str
    gpus: int


@dataclass(frozen=True, slots=True)
class ClearServicesOrder(Message):
    """End all copies of all services: their session has ended."""

    op: ClassVar[str] = "heddle-clear-services"


# -- worker to scheduler ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServiceLoadedReport(Message):
    """The answer to a `LoadServiceOrder`; as `core.events.ServiceLoaded`."""

    op: ClassVar[str] = "heddle-service-loaded"

    session: str
    host_id: HostId
    service: str
    first_gpu: int
    gpus: int
    ok: bool
    seconds: float
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ServiceEvictedReport(Message):
    """The answer to an `EvictServiceOrder`."""

    op: ClassVar[str] = "heddle-service-evicted"

    session: str
    host_id: HostId
    service: str
    first_gpu: int
    gpus: int


@dataclass(frozen=True, slots=True)
class ServiceLostReport(Message):
    """A resident copy has died without an order."""

    op: ClassVar[str] = "heddle-service-lost"

    session: str
    host_id: HostId
    service: str
    first_gpu: int
    gpus: int
    cause: str
