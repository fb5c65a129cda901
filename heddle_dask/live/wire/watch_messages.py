"""Messages of those who watch a cluster: terminals and tests. They need no session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from heddle_dask.live.wire.codec import Message, Request


@dataclass(frozen=True, slots=True)
class CurrentSnapshot(Message):
    """A picture of the cluster and its latest session, as `views.run_snapshot.RunSnapshot.as_json`."""

    op: ClassVar[str] = "heddle_snapshot"

    snapshot: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GetSnapshot(Request[CurrentSnapshot]):
    """What does a person see of the cluster now? Without prompts and tokens."""

    op: ClassVar[str] = "heddle_get_snapshot"
