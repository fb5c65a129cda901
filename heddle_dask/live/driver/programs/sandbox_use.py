"""How an action uses a sandbox: what its request says of it, and what to send to a worker that lacks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from heddle_dask.core.nouns import ActionRequest


@dataclass(frozen=True, slots=True)
class SandboxUse:
    """The sandbox of one action.

    Attributes
    ----------
    name
        Unlike that of every other sandbox of all sessions.
    memory_bytes
        Reserved on its host for its life.
    parent
        Sandbox of which it is a copy; empty: of none.
    with_past
        Makes function, arguments and keywords of the call again, together with the sandbox's past.
    """

    name: str
    memory_bytes: int
    parent: str
    with_past: Callable[[], tuple[Any, ...]]

    def added_to(self, request: ActionRequest) -> ActionRequest:
        """The request with the sandbox that it needs."""
        return replace(
            request,
            sandbox=self.name,
            sandbox_memory_bytes=self.memory_bytes,
            sandbox_parent=self.parent,
        )
