"""Messages about weights between the scheduler plugin and the workers of engines.

They are no session's own: an engine keeps its weights from one session to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from heddle_dask.core.ids import EngineId, PolicyVersion
from heddle_dask.live.wire.codec import Message


@dataclass(frozen=True, slots=True)
class FetchWeightsOrder(Message):
    """Bring published weights to this machine and verify them while the engine generates.

    A newer order for the same engine replaces one that is under way. Answered by a `WeightsFetchedReport`.

    Attributes
    ----------
    uri
        Of the manifest in the weight store.
    """

    op: ClassVar[str] = "heddle-fetch-weights"

    engine_id: EngineId
    version: PolicyVersion
    uri: str


@dataclass(frozen=True, slots=True)
class InstallWeightsOrder(Message):
    """Pause the engine, load the fetched weights, resume it. Answered by a `WeightsInstalledReport`."""

    op: ClassVar[str] = "heddle-install-weights"

    engine_id: EngineId
    version: PolicyVersion
    keep_kv: bool = False


@dataclass(frozen=True, slots=True)
class WeightsFetchedReport(Message):
    """The weights are verified and at hand, or were refused or not reached (`cause`, one line)."""

    op: ClassVar[str] = "heddle-weights-fetched"

    engine_id: EngineId
    version: PolicyVersion
    cause: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightsInstalledReport(Message):
    """The engine samples with these weights, or could not load them (`cause`, one line).

    Attributes
    ----------
    paused_s
        Seconds during which it generated nothing.
    """

    op: ClassVar[str] = "heddle-weights-installed"

    engine_id: EngineId
    version: PolicyVersion
    paused_s: float = 0.0
    cause: str = ""
