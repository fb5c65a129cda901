"""User ids that belong to one sandboxed run each, so that the kernel can count and bound its processes.

RLIMIT_NPROC counts per user and never binds root. When we run as root, each run therefore gets an id
of its own, far above those that a system hands out, derived from our process id: two workers of one
machine never share one.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from heddle_dask.core.errors import HeddleError

_BASE = 1 << 31
_SLOTS = 512  # 2^22 process ids x 512 slots fit between _BASE and 2^32


class UserIds:
    """Hands out user ids that no other run on this machine has."""

    def __init__(self) -> None:
        # First in, first out: what a run left for init to reap still counts for its user id.
        # The start is by chance for the same reason: it may be our second object in this process.
        self._free = deque(range(_SLOTS - 1))
        self._free.rotate(secrets.randbelow(_SLOTS))

    @contextmanager
    def one(self) -> Iterator[int]:
        """A user id for the length of one run; 511 runs at a time at most."""
        if not self._free:
            raise HeddleError("more than 511 sandboxed runs at once in one process")
        slot = self._free.popleft()
        try:
            yield _BASE + (os.getpid() % (1 << 22)) * _SLOTS + slot
        finally:
            self._free.append(slot)
