"""Measures running engines as a client: the points of a table.

- *Decoding*: `batch` contexts of one length are put into the prefix cache; then all of them decode together, without a
  significant prefill in between. Seconds per token are the difference between steps of n tokens and of one, over n - 1:
  on a busy machine a client may receive the first token late, so the time from it to the last token would be too short.
  The context grows meanwhile, and the point has its mean.
- *Prefill*: a prompt that is not cached, alone, to its first token. Its length is new as well, since a CPU engine
  compiles kernels for each number of tokens and keeps a few: the second prompt of a length would be faster.
- *Bursts*: many prompts at once, each with a cached part or without, until all have their first token.
- *Mixed*: sequences decode while callers send prompts with a cached part one after another.
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
from collections.abc import Awaitable, Callable, Iterator, Sequence

from heddle_dask.cost.measured import BurstPoint, DecodePoint, MixedPoint, TokensPoint
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, SamplingParams

# Ids that exist in every model, and none of which is an end token.
_FIRST_ID, _LAST_ID = 33, 120
# KV blocks of the context of a cached step.
_CACHED_BLOCKS = 2
# Cached and new tokens of a prompt in bursts; those of mixed points, and the contexts of their decoding sequences.
_BURSTS = ((0, 64), (0, 512), (1024, 64))
MIXED_MEASURED = (1024, 64)
DECODING_TOKENS = 512
# Share of the KV memory that a point may fill.
_MOST_KV = 0.8

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
                if not decode_fits(batch, context, self._tokens, capacity_tokens):
                    self._on_progress(f"left out: {batch} x {context} tokens exceed the KV cache")
                    continue
                self._on_progress(f"decoding {batch} x {context} tokens")
                seconds = await self._decode_together([mine[:batch] for mine in prompts], f"decode-{context}-{batch}")
                points.append(DecodePoint(batch, batch * (context + self._tokens // 2), seconds))
        return points

    async def bursts(self, slots: int, max_model_len: int, capacity_tokens: int) -> list[BurstPoint]:
        """Measure prompts at once: one, a quarter of the slots, and all slots, as far as they fit."""
        points = []
        for requests, cached, new in bursts_that_fit(slots, max_model_len, capacity_tokens, self._repeats + 1):
            self._on_progress(f"{requests} prompts of {cached} + {new} tokens at once")
            stems = [[self._prompt(e, cached) for _ in range(requests)] for e in range(len(self._clients))]
            name = f"burst-{requests}-{cached}-{new}"
            if cached:
                await self._warm(stems, name)

            async def piece(
                engine: int, repeat: int, stems: list[list[list[int]]] = stems, new: int = new, name: str = name
            ) -> float:
                prompts = [stem + self._prompt(engine, new) for stem in stems[engine]]
                return max(await self._each_s(engine, prompts, 1, f"{name}-{repeat}"))

            seconds = await all_busy(len(self._clients), piece, self._repeats + 1, first=1)
            points.append(BurstPoint(requests, cached, new, _mean(seconds)))
        return points

    async def mixed(self, slots: int, max_model_len: int, capacity_tokens: int) -> list[MixedPoint]:
        """Measure prompts beside a quarter and three quarters of the slots that decode, from two numbers of callers."""
        points = []
        cached, new = MIXED_MEASURED
        for decoding, callers in mixed_that_fit(slots, max_model_len, capacity_tokens, self._tokens):
            self._on_progress(f"{decoding} sequences and {callers} callers")
            engines = range(len(self._clients))
            name = f"mixed-{decoding}-{callers}"
            contexts = [[self._prompt(e, DECODING_TOKENS) for _ in range(decoding)] for e in engines]
            stems = [[self._prompt(e, cached) for _ in range(callers)] for e in engines]
            await self._warm([a + b for a, b in zip(contexts, stems, strict=True)], name)
            found = await asyncio.gather(*(self._beside(e, contexts[e], stems[e], name) for e in engines))
            seconds, prompts = zip(*found, strict=True)
            resident = decoding * (DECODING_TOKENS + self._tokens // 2)
            point = MixedPoint(decoding, resident, self._tokens, _mean(prompts), cached, new, _mean(seconds))
            points.append(point)
        return points

    async def _beside(
        self, engine: int, contexts: Sequence[list[int]], stems: Sequence[list[int]], name: str
    ) -> tuple[float, float]:
        """Seconds until all contexts have their tokens, and prompts of the callers that were answered meanwhile."""
        answered, ended = 0, asyncio.Event()

        async def call(number: int, stem: list[int]) -> None:
            nonlocal answered
            turn = 0
            while not ended.is_set():
                prompt = stem + self._prompt(engine, MIXED_MEASURED[1])
                await self._each_s(engine, [prompt], 1, f"{name}-{number}-{turn}")
                answered, turn = answered + 1, turn + 1

        async with asyncio.TaskGroup() as callers:
            for number, stem in enumerate(stems):
                callers.create_task(call(number, stem))
            seconds = max(await self._each_s(engine, contexts, self._tokens, f"{name}-decoding"))
            found = seconds, float(answered)
            ended.set()
        return found

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
        return statistics.median(await self._each_s(engine, prompts, tokens, name))

    async def _each_s(self, engine: int, prompts: Sequence[Sequence[int]], tokens: int, name: str) -> list[float]:
        """Seconds of each of several requests, sent at once."""

        async def one(index: int) -> float:
            sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=index)
            began_s = time.perf_counter()
            await self._clients[engine].generate(GenerateRequest(f"{name}-{index}", prompts[index], sampling))
            return time.perf_counter() - began_s

        return await asyncio.gather(*(one(index) for index in range(len(prompts))))

    async def _warm(self, prompts: Sequence[Sequence[Sequence[int]]], name: str) -> None:
        # All at once: an engine prefills many prompts in the time of few.
        await asyncio.gather(
            *(
                self._clients[engine].warm(prompt, f"{name}-warm-{index}")
                for engine in range(len(self._clients))
                for index, prompt in enumerate(prompts[engine])
            )
        )

    def _prompt(self, engine: int, length: int) -> list[int]:
        rng = self._rngs[engine]
        return [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(length)]


def bursts_that_fit(slots: int, max_model_len: int, capacity_tokens: int, times: int) -> Iterator[tuple[int, int, int]]:
    """Prompts at once, and cached and new tokens of each; the new ones of all `times` stay in the cache.

    A `capacity_tokens` of 0 is not known.
    """
    for cached, new in _BURSTS:
        for requests in sorted({1, max(1, slots // 4), slots}):
            kv_tokens = requests * (cached + times * (new + 1))
            if cached + new < max_model_len and (not capacity_tokens or kv_tokens <= _MOST_KV * capacity_tokens):
                yield requests, cached, new


def mixed_that_fit(slots: int, max_model_len: int, capacity_tokens: int, tokens: int) -> Iterator[tuple[int, int]]:
    """Sequences that decode `tokens` tokens, and callers beside them. A `capacity_tokens` of 0 is not known."""
    prompt_tokens, decoding_tokens = sum(MIXED_MEASURED), DECODING_TOKENS + tokens
    for decoding, callers in sorted({(max(1, n * slots // 4), c) for n in (1, 3) for c in (1, slots // 4)}):
        kv_tokens = decoding * decoding_tokens + callers * prompt_tokens
        fits = not capacity_tokens or kv_tokens <= _MOST_KV * capacity_tokens
        if callers >= 1 and fits and max(prompt_tokens, decoding_tokens) < max_model_len:
            yield decoding, callers


def decode_fits(batch: int, context: int, tokens: int, capacity_tokens: int) -> bool:
    """Whether the KV cache (0: not known) holds so many contexts with `tokens` more, beside partly filled blocks."""
    return not capacity_tokens or batch * (context + tokens) <= 0.9 * capacity_tokens


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
