"""Our priorities in the engine's sign: vLLM runs the smaller number first."""

from __future__ import annotations

# vLLM keeps priorities as Python ints, but its peers parse 32 bits; beyond that the order is all the same.
_LIMIT = 2**31 - 1

# Before every step: a move that queued behind the steps of a full engine would keep its trajectory waiting.
FIRST = -_LIMIT


def engine_priority(number: float) -> int:
    """The integer that the engine takes for our `Priority.number` (larger runs first); never `FIRST`."""
    return max(FIRST + 1, min(_LIMIT, -round(number)))
