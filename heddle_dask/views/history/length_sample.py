"""A uniform sample of finished trajectories: predicted against actual lengths, in bounded memory."""

from __future__ import annotations

import random

from heddle_dask.views.history.run_snapshot import LengthPair


class LengthSample:
    """Reservoir sampling with a seed: equal events give the equal sample.

    Attributes
    ----------
    seen
        Number of pairs that were offered.
    """

    def __init__(self, most: int, seed: int = 0) -> None:
        self.seen = 0
        self._most = most
        self._random = random.Random(seed)
        self._pairs: list[LengthPair] = []

    def offer(self, pair: LengthPair) -> None:
        """Take the pair with the probability that makes every pair equally likely in the end."""
        self.seen += 1
        if len(self._pairs) < self._most:
            self._pairs.append(pair)
            return
        place = self._random.randrange(self.seen)
        if place < self._most:
            self._pairs[place] = pair

    def pairs(self) -> tuple[LengthPair, ...]:
        """The sample."""
        return tuple(self._pairs)
