"""Measures running engines as a client: the points of a table.

- *Decoding*: `batch` contexts of one length are put into the prefix cache; then all of them decode together, without a
  significant prefill in between. Seconds per token are the difference between steps of n tokens and of one, over n - 1:
  on a busy machine a client may receive the first token late, so the time from it to the last token would be too short.
  The context grows meanwhile, and the point has its mean.
- *Prefill*: a prompt that is not cached, alone, to its first token. Its length is new as well, since a CPU engine
  compiles kernels for each number of tokens and keeps a few: the second prompt of a length would be faster.
- *Cached step*: one token after a context of which all but the last token is cached: the time of a request.

Requests are those of live steps: streamed, seeded, with logprobs. Several engines do the same at the same time, and
none is idle before all have finished. A point is the mean over engines and repeats, as in a rollout: with few cores,
the operating system lets one engine run and another wait at random.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

from heddle_dask.cost.measured import DecodePoint, TokensPoint
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, SamplingParams

# Ids that exist in every model, and none of which is an end token.
_FIRST_ID, _LAST_ID = 33, 120
# KV blocks of the context of a cached step.
_CACHED_BLOCKS = 2

Piece = Callable[[int, int], Awaitable[float]]
"""Runs one repeat on one engine, by their numbers; returns its seconds."""


class Sweep:
    """Measures identical engines concurrently.

    Parameters
    ----------
    tokens
        Tokens that each sequence decodes for a point.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        tokens: int,
        repeats: int,
        seed: int,
        on_progress: Callable[[str], None],
    ) -> None:
        self._clients = clients
        self._tokens = tokens
        self._repeats = repeats
        self._rngs = [random.Random(f"profile {seed} {number}") for number in range(len(clients))]
        self._on_progress = on_progress

    async def prefill(self, lengths: Sequence[int]) -> list[TokensPoint]:
        points = []
        # The first prompts of an engine allocate memory, which takes seconds.
        each = [[self._prompt(engine, length) for length in lengths] for engine in range(len(self._clients))]
        await self._warm(each, "first")
        for length in lengths:
            self._on_progress(f"prefill of {length} tokens")

            async def piece(engine: int, repeat: int, length: int = length) -> float:
                tokens = max(1, length - repeat)
                name = f"prefill-{length}-{repeat}"
                return (await self._clients[engine].warm(self._prompt(engine, tokens), name)).seconds

            # The first prompt of a length may still allocate.
            seconds = await all_busy(len(self._clients), piece, self._repeats + 1, first=1)
            points.append(TokensPoint(max(1, length - (self._repeats + 1) // 2), _mean(seconds)))
        return points

    async def decode(self, batches: Sequence[int], contexts: Sequence[int], capacity_tokens: int) -> list[DecodePoint]:
        """Measure decoding batches; a pair that exceeds the KV capacity (0: not known) is left out."""
        points = []
        for context in contexts:
            prompts = [
                [self._prompt(engine, context) for _ in range(max(batches))] for engine in range(len(self._clients))
            ]
            for batch in batches:
                # Leave room for partly filled blocks.
                if capacity_tokens and batch * (context + self._tokens) > 0.9 * capacity_tokens:
                    self._on_progress(f"left out: {batch} x {context} tokens exceed the KV cache")
                    continue
                self._on_progress(f"decoding {batch} x {context} tokens")
                seconds = await self._decode_together([mine[:batch] for mine in prompts], f"decode-{context}-{batch}")
                points.append(DecodePoint(batch, batch * (context + self._tokens // 2), seconds))
        return points

    async def cached_step(self, block_tokens: int, max_model_len: int) -> TokensPoint | None:
        """Measure a step of one token with a cached context; None if the context limit is too short."""
        length = _CACHED_BLOCKS * block_tokens + 1
        if length >= max_model_len:
            return None
        self._on_progress("a step with its context cached")
        prompts = [self._prompt(engine, length) for engine in range(len(self._clients))]
        await self._warm([[prompt] for prompt in prompts], "cached")

        async def piece(engine: int, repeat: int) -> float:
            return await self._answered_s(engine, [prompts[engine]], 1, f"cached-{repeat}")

        # More repeats, since these steps are short.
        seconds = await all_busy(len(self._clients), piece, 4 * self._repeats + 1, first=1)
        return TokensPoint(length, _mean(seconds))

    async def _decode_together(self, prompts: Sequence[Sequence[Sequence[int]]], name: str) -> float:
        """Seconds per token of sequences that decode at the same time; `prompts` by engine."""
        await self._warm(prompts, name)
        means = []
        for tokens in (1, self._tokens):

            async def piece(engine: int, repeat: int, tokens: int = tokens) -> float:
                return await self._answered_s(engine, prompts[engine], tokens, f"{name}-{tokens}-{repeat}")

            means.append(_mean(await all_busy(len(self._clients), piece, self._repeats)))
        return round(max(1e-6, (means[1] - means[0]) / (self._tokens - 1)), 6)

    async def _answered_s(self, engine: int, prompts: Sequence[Sequence[int]], tokens: int, name: str) -> float:
        async def one(index: int) -> float:
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=index)
            began_s = time.perf_counter()
            await self._clients[engine].generate(GenerateRequest(f"{name}-{index}", prompts[index], sampling))
            return time.perf_counter() - began_s

        return statistics.median(await asyncio.gather(*(one(index) for index in range(len(prompts)))))

    async def _warm(self, prompts: Sequence[Sequence[Sequence[int]]], name: str) -> None:
        async def one(engine: int) -> None:
            for index, prompt in enumerate(prompts[engine]):
                await self._clients[engine].warm(prompt, f"{name}-warm-{index}")

        await asyncio.gather(*(one(engine) for engine in range(len(self._clients))))

    def _prompt(self, engine: int, length: int) -> list[int]:
        rng = self._rngs[engine]
        return [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(length)]


async def all_busy(engines: int, piece: Piece, repeats: int, *, first: int = 0) -> list[float]:
    """Seconds of the repeats from `first` on, over all engines; an engine goes on until all have finished."""
    unfinished = engines

    async def one(engine: int) -> list[float]:
        nonlocal unfinished
        seconds: list[float] = []
        while unfinished:
            seconds.append(await piece(engine, len(seconds)))
            unfinished -= len(seconds) == repeats
        return seconds[first:repeats]

    return [taken for mine in await asyncio.gather(*map(one, range(engines))) for taken in mine]


def _mean(seconds: Sequence[float]) -> float:
    return round(statistics.fmean(seconds), 6)
