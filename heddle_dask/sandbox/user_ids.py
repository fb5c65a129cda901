"""User ids that belong to one sandboxed run each, so that the kernel can count and bound its processes.

RLIMIT_NPROC counts per user and never binds root. When we run as root, each run therefore gets an id
of its own, far above those that a system hands out.
"""

from __future__ import annotations

import secrets

_FIRST = 1 << 31
_COUNT = (1 << 31) - 1  # the last id, 2^32 - 1, means "no user"


def private_user_id() -> int:
    """A user id that no other run on this machine has.

    By chance, and from all there are: a run's dead processes count for its id until init has reaped
    them, and workers in other containers of the machine draw from the same ids. A small range that is
    used again, even in turn, has met such leftovers. A thousand runs at a time share no id but in one
    case of four thousand.
    """
    return _FIRST + secrets.randbelow(_COUNT)
