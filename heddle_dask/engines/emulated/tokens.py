"""Plausible tokens: each is a function of the seed and of all tokens before it only.

So a step repeated with its seed gives the same tokens in any batch, and a step that was interrupted and continued
gives the tokens of the uninterrupted step.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from array import array
from collections.abc import Sequence

FIRST_PRINTABLE = 32
PRINTABLE = 95

_MASK = (1 << 64) - 1
_LEVELS = 1024
# Half the logarithm of a uniform number: mean -0.5, as for a model with fairly high certainty.
_LOGPROBS = tuple(round(math.log((level + 0.5) / _LEVELS) / 2, 5) for level in range(_LEVELS))
_BYTES = tuple(token.to_bytes(4, "little") for token in range(FIRST_PRINTABLE + PRINTABLE))


class TokenSource:
    """Draws tokens for one engine.

    Parameters
    ----------
    mean_length_tokens
        Mean number of tokens, end token included, of a step in which end tokens count.
    """

    def __init__(self, seed: int, mean_length_tokens: float, end_token_id: int) -> None:
        self._seed = seed
        self._end_below = int((1 << 32) / mean_length_tokens)
        self._end_token_id = end_token_id

    def draw(
        self,
        context: Sequence[int],
        count: int,
        *,
        seed: int | None,
        ignore_eos: bool,
        stop_token_ids: Sequence[int] = (),
    ) -> tuple[list[int], list[float], bool]:
        """Up to `count` tokens after `context`, their logprobs, and whether an end token ended them.

        `seed` is the request's; None means greedy.
        """
        salt = self._salt(seed)
        state = zlib.crc32(_packed(context))
        end_below = -1 if ignore_eos else self._end_below
        stops = frozenset() if ignore_eos else frozenset(stop_token_ids)
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(count):
            mixed = ((state ^ salt) * 0x9E3779B97F4A7C15) & _MASK
            mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & _MASK
            logprobs.append(_LOGPROBS[mixed >> 54])
            if (mixed & 0xFFFFFFFF) < end_below:
                tokens.append(stop_token_ids[0] if stop_token_ids else self._end_token_id)
                return tokens, logprobs, True
            token = FIRST_PRINTABLE + ((mixed >> 33) & 0xFFFFF) % PRINTABLE
            tokens.append(token)
            if token in stops:
                return tokens, logprobs, True
            state = zlib.crc32(_BYTES[token], state)
        return tokens, logprobs, False

    def _salt(self, seed: int | None) -> int:
        # Negative seeds are the engine's own. A greedy step, and one with a seed, is the same on every engine.
        own = seed is not None and seed < 0
        text = f"{self._seed if own else 0}:{seed}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _packed(context: Sequence[int]) -> bytes:
    # Must give the same bytes as _BYTES token by token, or a continuation would differ.
    return array("I", context).tobytes()
