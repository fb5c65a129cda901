"""``python -m benchmarks bursts``: what prompts cost running engines, many at once and beside decoding sequences.

Engines with CUDA graphs, chunked prefill and a prefix cache overlap what one prompt alone pays for. Two measurements
on all given engines at the same time; a point is the mean over engines and repeats:

- *burst*: `requests` prompts at once, each of `cached_tokens` that the prefix cache has and `new_tokens` that it has
  not, with `tokens` generated tokens each.
- *beside*: `decoding` sequences generate `tokens` each, alone and while `loops` callers send such prompts one after
  another.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.address import EngineAddress
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, SamplingParams

REPEATS = 2
"""After a first one, which is not counted: kernels may still be compiled."""
# Ids that exist in every model, and none of which is an end token.
_FIRST_ID, _LAST_ID = 33, 120
# Share of the KV memory that a point may fill.
_MOST_KV = 0.8


@dataclass(frozen=True, slots=True)
class Burst:
    """Prompts at once."""

    requests: int
    cached_tokens: int
    new_tokens: int
    tokens: int = 1

    @property
    def kv_tokens(self) -> int:
        """KV that it fills with all its repeats."""
        return self.requests * (self.cached_tokens + (REPEATS + 1) * (self.new_tokens + self.tokens))


@dataclass(frozen=True, slots=True)
class Beside:
    """Prompts beside decoding sequences."""

    decoding: int
    loops: int
    context_tokens: int = 512
    tokens: int = 120
    cached_tokens: int = 1024
    new_tokens: int = 64

    @property
    def kv_tokens(self) -> int:
        """KV that it fills; the new tokens of prompts that have ended may go."""
        own = self.decoding * (self.context_tokens + self.tokens)
        return own + self.loops * (self.cached_tokens + self.new_tokens)


def bursts_that_fit(capacity_tokens: int, slots: int, context_tokens: int) -> Iterator[Burst]:
    """The grid: growing steps of one sequence, prompts without and with a cached prefix."""
    grid = [Burst(1, 0, 64, tokens) for tokens in (1, 2, 4, 8, 16, 64)]
    powers = [1 << exponent for exponent in range(7)]
    grid += [Burst(requests, 0, new) for new in (16, 64, 256, 1024, 4000) for requests in powers]
    grid += [
        Burst(requests, cached, new) for cached in (1024, 4096) for new in (16, 64, 256) for requests in powers[::2]
    ]
    for one in grid:
        long = one.cached_tokens + one.new_tokens + one.tokens
        if one.requests <= slots and long <= context_tokens and one.kv_tokens <= _MOST_KV * capacity_tokens:
            yield one


@dataclass
class Probe:
    """Sends the prompts of points to engines, all engines at once."""

    clients: Sequence[EngineClient]
    seed: int = 0
    _random: random.Random = field(init=False)
    _steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._random = random.Random(f"bursts {self.seed}")

    async def burst(self, point: Burst) -> dict[str, float]:
        """Seconds until all prompts are answered, and of the first and the median one."""
        found = await asyncio.gather(*(self._burst(client, point) for client in self.clients))
        walls, firsts, medians = zip(*(one for mine in found for one in mine), strict=True)
        return {"wall_s": _mean(walls), "first_s": _mean(firsts), "median_s": _mean(medians)}

    async def beside(self, point: Beside) -> dict[str, float]:
        """Seconds of the decoding sequences; prompts answered meanwhile, and the mean seconds of one."""
        found = await asyncio.gather(*(self._beside(client, point) for client in self.clients))
        walls, counts, prompts = zip(*found, strict=True)
        return {"wall_s": _mean(walls), "prompts": _mean(counts), "prompt_s": _mean(prompts)}

    async def _burst(self, client: EngineClient, point: Burst) -> list[tuple[float, float, float]]:
        stems = [self._ids(point.cached_tokens) for _ in range(point.requests)]
        if point.cached_tokens:
            await asyncio.gather(*(self._step(client, stem, 1) for stem in stems))
        found = []
        for _ in range(REPEATS + 1):
            prompts = [stem + self._ids(point.new_tokens) for stem in stems]
            began_s = time.perf_counter()
            each = await asyncio.gather(*(self._step(client, prompt, point.tokens) for prompt in prompts))
            found.append((time.perf_counter() - began_s, min(each), statistics.median(each)))
        return found[1:]

    async def _beside(self, client: EngineClient, point: Beside) -> tuple[float, int, float]:
        stems = [self._ids(point.cached_tokens) for _ in range(point.loops)]
        contexts = [self._ids(point.context_tokens) for _ in range(point.decoding)]
        await asyncio.gather(*(self._step(client, prompt, 1) for prompt in (*stems, *contexts)))
        taken: list[float] = []
        ended = asyncio.Event()

        async def call(stem: list[int]) -> None:
            while not ended.is_set():
                taken.append(await self._step(client, stem + self._ids(point.new_tokens), 1))

        async with asyncio.TaskGroup() as callers:
            for stem in stems:
                callers.create_task(call(stem))
            began_s = time.perf_counter()
            await asyncio.gather(*(self._step(client, context, point.tokens) for context in contexts))
            wall_s, answered = time.perf_counter() - began_s, list(taken)
            ended.set()
        return wall_s, len(answered), statistics.fmean(answered) if answered else 0.0

    async def _step(self, client: EngineClient, prompt: list[int], tokens: int) -> float:
        self._steps += 1
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=self._steps)
        began_s = time.perf_counter()
        await client.generate(GenerateRequest(f"bursts-{self.seed}-{self._steps}", prompt, sampling))
        return time.perf_counter() - began_s

    def _ids(self, length: int) -> list[int]:
        return [self._random.randint(_FIRST_ID, _LAST_ID) for _ in range(length)]


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 6)


async def measure(
    addresses: Sequence[EngineAddress],
    slots: int,
    context_tokens: int,
    seed: int,
    keep: Callable[[dict[str, object]], None],
) -> None:
    """Measure each point of `Beside` and of `bursts_that_fit`, and keep its row when it is done."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(EngineClient(address)) for address in addresses]
        capacity_tokens = (await clients[0].describe()).kv_capacity_tokens
        probe = Probe(clients, seed)
        facts = {"engines": len(clients), "slots": slots, "capacity_tokens": capacity_tokens}
        for decoding in (16, 48):
            for loops in (0, 1, 4, 12):
                beside = Beside(decoding, loops)
                if decoding + loops <= slots and beside.kv_tokens <= _MOST_KV * capacity_tokens:
                    keep({**facts, "what": "beside", **asdict(beside), **await probe.beside(beside)})
        for burst in bursts_that_fit(capacity_tokens, slots, context_tokens):
            keep({**facts, "what": "burst", **asdict(burst), **await probe.burst(burst)})


@click.command("bursts")
@click.option("--port", "ports", type=int, multiple=True, required=True, help="Loopback port of a running engine.")
@click.option("--slots", type=click.IntRange(min=1), required=True, help="Sequences of a batch of each engine.")
@click.option("--context", type=click.IntRange(min=256), default=8192, show_default=True, help="Its longest context.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="JSON lines, a row a point."
)
@click.option("--seed", type=int, default=0, show_default=True)
def bursts(ports: tuple[int, ...], slots: int, context: int, out: Path, seed: int) -> None:
    """Measure prompts at once, and beside decoding sequences, on engines that run already."""
    if out.exists():
        raise BadInput(f"--out {out} exists: name another file")
    with out.open("w", encoding="utf-8", buffering=1) as file:
        addresses = [EngineAddress(port=port) for port in ports]
        asyncio.run(measure(addresses, slots, context, seed, lambda row: print(json.dumps(row), file=file)))
    click.echo(f"{out}: points of {len(ports)} engines", err=True)
