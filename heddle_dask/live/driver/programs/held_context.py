"""What the rollout worker holds of a trajectory's context, so that a step sends the rest only."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from heddle_dask.records.token_record import TokenRecord


@dataclass(frozen=True, slots=True)
class ContextDelta:
    """Length and CRC-32 of the tokens that the worker holds, and the tokens that follow, as little-endian int32."""

    base_tokens: int
    base_crc: int
    token_ids: bytes


class HeldContext:
    """The worker's copy of one context. It may be dropped there at any time; the checksum finds that out."""

    def __init__(self) -> None:
        self._tokens = 0
        self._crc = 0
        # Of the context that was sent last; None when no worker has seen it.
        self._sent_crc: int | None = None

    def delta(self, record: TokenRecord, send_all: bool) -> ContextDelta:
        """What the next step has to send; `send_all`: the worker's copy may be gone."""
        tokens, crc = (0, 0) if send_all else (self._tokens, self._crc)
        token_ids = np.ascontiguousarray(record.token_ids[tokens:], dtype="<i4").tobytes()
        self._sent_crc = zlib.crc32(token_ids, crc)
        return ContextDelta(tokens, crc, token_ids)

    def not_sent(self) -> None:
        """The next answer is a recorded one: no worker has seen its context."""
        self._sent_crc = None

    def answered(self, record: TokenRecord, sampled: bytes) -> None:
        """The worker holds the context that was sent, followed by what it sampled, which `record` ends with."""
        if self._sent_crc is None:
            self._tokens, self._crc = 0, 0
        else:
            self._tokens, self._crc = len(record), zlib.crc32(sampled, self._sent_crc)
