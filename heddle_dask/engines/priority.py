"""Priorities in the engine's sign: vLLM runs the smaller number first."""

from __future__ import annotations

# vLLM keeps priorities as Python ints, but other engines parse 32 bits; larger values are clipped.
_LIMIT = 2**31 - 1

# Precedes every step: a migration that queued behind the steps of a full engine would delay its trajectory.
FIRST = -_LIMIT


def engine_priority(number: float) -> int:
    """The integer that the engine takes for our `Priority.number` (larger runs first); never `FIRST`."""
    return max(FIRST + 1, min(_LIMIT, -round(number)))
