"""What the roots of a run's sandboxes contain, journalled when each is first used, so that a change is noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from heddle_dask.environments.input_identity import root_digest

ROOT_LINE = "sandbox-root"
"""Kind of the journal record of a root; kept as long as the journal."""


class SandboxRoots:
    """The roots that a session has used."""

    def __init__(self, journal: Callable[[str, dict[str, Any]], None] = lambda kind, body: None) -> None:
        self._journal = journal
        self._known: set[str] = set()

    async def used(self, root: str) -> None:
        """A sandbox on this root is about to run; one that this machine does not have is not compared."""
        if not root or root in self._known:
            return
        self._known.add(root)
        digest = await asyncio.to_thread(root_digest, root)
        if digest:
            self._journal(ROOT_LINE, {"root": root, "digest": digest})
