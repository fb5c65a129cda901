"""The KV cache of an emulated engine: a prefix cache in blocks, counted in tokens.

A block is a number of tokens (16, or that of the cost) together with all tokens before them. Blocks in use are
referenced; unused blocks are evicted least recently used first, the tail of a context before its head. Tokens sampled
by a running request are counted, and become blocks when it ends.

One simplification: a request's last, partly filled block counts only its tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from heddle_dask.cost.batching import Job
from heddle_dask.cost.iteration import BLOCK_TOKENS

_TOKEN_BYTES = array("I").itemsize


@dataclass(slots=True, eq=False)
class BlockAllocation:
    """The cache allocation of one request.

    Attributes
    ----------
    blocks
        Ids of its full prompt blocks, in order.
    loose_tokens
        Tokens beyond the full blocks.
    cached_tokens
        Prompt tokens that were already cached.
    """

    blocks: list[int]
    loose_tokens: int
    cached_tokens: int


@dataclass(slots=True, eq=False, kw_only=True)
class TokenJob(Job):
    """A job with its token ids."""

    prompt: Sequence[int]
    tokens: Callable[[int], Sequence[int]]

    def context(self, generated: int) -> list[int]:
        """Prompt and the first `generated` sampled tokens."""
        return [*self.prompt, *self.tokens(generated)]


@dataclass(slots=True)
class KvCache:
    """Prefix cache of `capacity_tokens`; `free_tokens` can be allocated, with evictions if needed."""

    capacity_tokens: int
    block_tokens: int = BLOCK_TOKENS
    _child: dict[tuple[int, bytes], int] = field(default_factory=dict)
    _key: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    _users: dict[int, int] = field(default_factory=dict)
    # Insertion order is order of last use: a dict is the LRU list.
    _idle: dict[int, None] = field(default_factory=dict)
    # Blocks that hold KV; of the blocks in use, those that at least one job has released.
    _computed: set[int] = field(default_factory=set)
    _loose_tokens: int = 0
    _last_id: int = 0

    @property
    def free_tokens(self) -> int:
        return self.capacity_tokens - len(self._users) * self.block_tokens - self._loose_tokens

    @property
    def resident_tokens(self) -> int:
        return (len(self._users) + len(self._idle)) * self.block_tokens + self._loose_tokens

    def hit_tokens(self, context: Sequence[int]) -> int:
        """Tokens of `context` that a request with it would find cached (never all of them)."""
        found = self._find(_packed(context), (len(context) - 1) // self.block_tokens)
        return len(found) * self.block_tokens

    def acquire(self, context: Sequence[int], spare_tokens: int) -> BlockAllocation | None:
        """Allocate room for `context`; None if less than `spare_tokens` would remain free."""
        packed = _packed(context)
        full = len(context) // self.block_tokens
        found = self._find(packed, full)
        new_tokens = len(context) - len(found) * self.block_tokens
        woken = sum(block in self._idle for block in found) * self.block_tokens
        if self.free_tokens - woken - new_tokens < spare_tokens:
            return None
        for block in found:
            self._idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        # The last token must be computed anyway, to sample from.
        cached = min(len(found), (len(context) - 1) // self.block_tokens) * self.block_tokens
        blocks = found
        parent = found[-1] if found else 0
        for index in range(len(found), full):
            parent = self._add(parent, packed, index)
            self._users[parent] = 1
            blocks.append(parent)
        held = BlockAllocation(blocks, len(context) - full * self.block_tokens, cached)
        self._loose_tokens += held.loose_tokens
        self._evict()
        return held

    def grow_all(self, tokens: int) -> None:
        """Count `tokens` more in total; each request adds its share to `loose_tokens` before its release."""
        self._loose_tokens += tokens
        self._evict()

    def release(self, held: BlockAllocation, context: Sequence[int]) -> None:
        """Release the allocation of a request; the full blocks of `context` stay cached until they are evicted.

        `context` is the computed part, from the first token on; blocks beyond it, of
        an interrupted prefill, hold no KV and are dropped, unless another job computed them before.
        """
        self._loose_tokens -= held.loose_tokens
        blocks = list(held.blocks)
        full = len(context) // self.block_tokens
        if full > len(blocks):
            packed = _packed(context)
            parent = blocks[-1] if blocks else 0
            for index in range(len(blocks), full):
                known = self._child.get((parent, self._slice(packed, index)))
                parent = self._add(parent, packed, index) if known is None else known
                self._users[parent] = self._users.get(parent, 0) + 1
                self._idle.pop(parent, None)
                blocks.append(parent)
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            if index < full:
                self._computed.add(block)
            users = self._users[block] - 1
            if users:
                self._users[block] = users
                continue
            del self._users[block]
            if block in self._computed:
                self._idle[block] = None
            else:  # reserved for a prompt with an interrupted prefill
                del self._child[self._key.pop(block)]
        self._evict()

    def clear(self) -> bool:
        """Forget all KV; False, and nothing is forgotten, while some of it is in use."""
        if self._users:
            return False
        for block in self._idle:
            del self._child[self._key.pop(block)]
        self._idle.clear()
        self._computed.clear()
        return True

    def _find(self, packed: bytes, most: int) -> list[int]:
        found: list[int] = []
        parent = 0
        for index in range(most):
            block = self._child.get((parent, self._slice(packed, index)))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def _add(self, parent: int, packed: bytes, index: int) -> int:
        self._last_id += 1
        key = (parent, self._slice(packed, index))
        self._child[key] = self._last_id
        self._key[self._last_id] = key
        return self._last_id

    def _slice(self, packed: bytes, index: int) -> bytes:
        size = self.block_tokens * _TOKEN_BYTES
        return packed[index * size : (index + 1) * size]

    def _evict(self) -> None:
        while self._idle and self.resident_tokens > self.capacity_tokens:
            block = next(iter(self._idle))
            del self._idle[block]
            self._computed.discard(block)
            del self._child[self._key.pop(block)]


class RoomForTokens:
    """A `KvCache` as the KV cache of a `cost.batching.ContinuousBatch`, for jobs with token ids."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache

    @property
    def free_tokens(self) -> int:
        return self.cache.free_tokens

    def hit_tokens(self, job: TokenJob) -> int:
        return self.cache.hit_tokens(_context(job))

    def take(self, job: TokenJob, spare_tokens: int) -> BlockAllocation | None:
        return self.cache.acquire(_context(job), spare_tokens)

    def grow_all(self, tokens: int) -> None:
        self.cache.grow_all(tokens)

    def give_back(self, job: TokenJob, held: BlockAllocation, computed_tokens: int) -> None:
        self.cache.release(held, job.context(job.generated)[:computed_tokens])


def _context(job: TokenJob) -> Sequence[int]:
    return job.context(job.generated) if job.generated else job.prompt


def _packed(context: Sequence[int]) -> bytes:
    return array("I", context).tobytes()
