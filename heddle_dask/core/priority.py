"""The priority of a step: a level first, tokens within the level."""

from __future__ import annotations

from typing import NamedTuple

# Factor that combines level and tokens into one number for engines; larger than any context.
LEVEL_TOKENS = 2**24


class Priority(NamedTuple):
    """Larger runs first; compared by `level`, then by `tokens`.

    Attributes
    ----------
    level
        The level of the step. Strategies without levels leave it at 0.
    tokens
        Tokens of work, from 0 on. They order the steps of one level.
    """

    level: int = 0
    tokens: float = 0.0

    @property
    def number(self) -> float:
        """The same order as one number, larger first. Exact for `tokens` below `LEVEL_TOKENS`."""
        return self.level * LEVEL_TOKENS + self.tokens


NORMAL = Priority()
