"""Private user ids of sandboxed runs, by which the kernel can count and limit their processes.

RLIMIT_NPROC counts per user and does not apply to root. As root, each run therefore gets its own user id, far above
those that a system assigns.
"""

from __future__ import annotations

import secrets

_FIRST = 1 << 31
_COUNT = (1 << 31) - 1  # the last id, 2^32 - 1, means "no user"


def private_user_id() -> int:
    """A random user id that no other run on this machine has, with high probability.

    It is drawn from all ids, because dead processes of a run count for its id until init has reaped them, and workers
    in other containers of the machine draw from the same ids; with a small range such collisions have occurred. With
    a thousand concurrent runs, the probability of a collision is one in four thousand.
    """
    return _FIRST + secrets.randbelow(_COUNT)
