"""The context cache of a rollout worker: with a cached context, a step need only bring its delta.

The driver owns the token record; a cached context is a copy that may be dropped at any time. A base is recognised by
its length and CRC-32, so a copy that has diverged is a miss and never a wrong prompt.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
EMPTY: Ids = np.zeros(0, dtype="<i4")


def crc_of(data: bytes, start: int = 0) -> int:
    """CRC-32 of little-endian int32 ids; `start` is the CRC of what precedes them."""
    return zlib.crc32(data, start)


@dataclass(frozen=True, slots=True)
class CachedContext:
    """Token ids and their CRC-32."""

    token_ids: Ids
    crc: int

    def extended(self, delta: bytes) -> CachedContext:
        """This context followed by the ids in `delta`."""
        ids = np.concatenate([self.token_ids, np.frombuffer(delta, dtype="<i4")])
        return CachedContext(ids, crc_of(delta, self.crc))

    @classmethod
    def of(cls, data: bytes) -> CachedContext:
        """The context of these little-endian int32 ids."""
        return cls(EMPTY, 0).extended(data)

    def is_base(self, tokens: int, crc: int) -> bool:
        """Whether this is the context of that length and checksum."""
        return len(self.token_ids) == tokens and self.crc == crc


class ContextCache:
    """Least recently used contexts, up to `capacity_tokens` together."""

    def __init__(self, capacity_tokens: int = 64_000_000) -> None:
        self.capacity_tokens = capacity_tokens
        self.tokens = 0
        self._contexts: OrderedDict[tuple[str, str], CachedContext] = OrderedDict()

    def get(self, session: str, trajectory_id: str) -> CachedContext | None:
        context = self._contexts.get((session, trajectory_id))
        if context is not None:
            self._contexts.move_to_end((session, trajectory_id))
        return context

    def put(self, session: str, trajectory_id: str, context: CachedContext) -> None:
        self.drop(session, trajectory_id)
        self._contexts[(session, trajectory_id)] = context
        self.tokens += len(context.token_ids)
        while self.tokens > self.capacity_tokens and len(self._contexts) > 1:
            _, oldest = self._contexts.popitem(last=False)
            self.tokens -= len(oldest.token_ids)

    def drop(self, session: str, trajectory_id: str) -> None:
        context = self._contexts.pop((session, trajectory_id), None)
        if context is not None:
            self.tokens -= len(context.token_ids)
