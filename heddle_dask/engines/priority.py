"""Our priorities in the engine's sign: vLLM runs the smaller number first."""

from __future__ import annotations

# vLLM keeps priorities as Python ints, but its peers parse 32 bits; beyond that the order is all the same.
_LIMIT = 2**31 - 1


def engine_priority(priority: float) -> int:
    """The integer that the engine takes for our `priority` (larger runs first)."""
    return max(-_LIMIT, min(_LIMIT, -round(priority)))
