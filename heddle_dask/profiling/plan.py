"""The measurements of `heddle profile`: batches, contexts, prompts, and KV transfers between two engines.

For each length and repeat of a transfer, a random context is computed on the source, as after a step; then it is
exported, and imported by the target. Both times are complete HTTP calls.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.measured import TokensPoint
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import KvTransferFailed
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec, engine_kind

START_S = 300.0
STEP_TOKENS = 32
"""Tokens of the context window that stay free for the step after a transfer."""
# Ids that exist in every model, and none of which ends a sequence.
_FIRST_ID, _LAST_ID = 33, 120


async def measure_kv_transfer(
    spec: EngineSpec,
    contexts: Sequence[int],
    repeats: int,
    seed: int,
    on_progress: Callable[[str], None],
) -> list[TokensPoint]:
    """Measure transfers between two engines of `spec`.

    Returns
    -------
    list of TokensPoint
        Per length of `contexts`, the median export plus the median import. A length at which every transfer failed is
        left out.

    Raises
    ------
    EngineStartError
        An engine did not start.
    """
    if not contexts:
        return []
    spec = replace(spec, kv_transfer=True)
    rng = random.Random(seed)
    points = []
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heddle-kv-")))
        on_progress("starting two engines")
        processes = [EngineProcess(spec, directory / name) for name in ("source", "target")]
        for process in processes:
            stack.push_async_callback(process.stop)
        addresses = await asyncio.gather(*(process.start(START_S) for process in processes))
        dialect = engine_kind(spec.kind).dialect
        source, target = [await stack.enter_async_context(EngineClient(address, dialect)) for address in addresses]
        on_progress("warming up")
        await _transfers(source, target, contexts[0], 2, rng)
        for length in contexts:
            on_progress(f"{length} tokens")
            pairs = await _transfers(source, target, length, repeats, rng)
            if pairs:
                seconds = sum(statistics.median(times) for times in zip(*pairs, strict=True))
                points.append(TokensPoint(length, round(seconds, 6)))
    return points


async def _transfers(
    source: EngineClient, target: EngineClient, length: int, repeats: int, rng: random.Random
) -> list[tuple[float, float]]:
    """Seconds of export and import of each transfer that succeeded."""
    pairs = []
    for index in range(repeats):
        tokens = [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(length)]
        name = f"kv-{length}-{index}-{rng.getrandbits(32):08x}"
        await source.warm(tokens, f"{name}-step")
        try:
            began_s = time.perf_counter()
            handle = await source.export_kv(f"{name}-export", tokens)
            exported_s = time.perf_counter()
            await target.import_kv(f"{name}-import", tokens, handle)
        except KvTransferFailed:
            continue
        pairs.append((exported_s - began_s, time.perf_counter() - exported_s))
    return pairs


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """The measurements of an engine.

    Attributes
    ----------
    batches, contexts
        Numbers of sequences, and context tokens of each; a pair that exceeds the KV capacity is left out.
    tokens
        Tokens that each sequence decodes for a point.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    tokens: int = 128
    repeats: int = 5

    def contexts_to_move(self) -> tuple[int, ...]:
        """Lengths for KV transfers: those of `contexts`, shortened if a step would not fit after them."""
        longest = max(self.contexts) + self.tokens - STEP_TOKENS
        return tuple(dict.fromkeys(min(length, longest) for length in self.contexts if longest >= 1))

    def check(self, spec: EngineSpec) -> None:
        """Refuse measurements that the engine cannot run."""
        if max(self.batches) > spec.named_slots:
            raise BadInput(
                f"batch of {max(self.batches)} exceeds {spec.named_slots} slots: use --slots {max(self.batches)}"
            )
        longest = max(max(self.contexts) + self.tokens, max(self.prompts) + 1)
        if longest > spec.named_context_tokens:
            raise BadInput(
                f"{longest} tokens of context and answer exceed the engine's {spec.named_context_tokens}: "
                "use shorter ones"
            )


def plan_for(slots: int, max_model_len: int, *, tokens: int = 128, repeats: int = 5) -> ProfilePlan:
    """Batches: powers of two, one and a half times these, and `slots`; lengths in factors of four up to the limit."""
    room = max_model_len - tokens
    if room < 1:
        raise BadInput(f"{tokens} tokens to decode leave no context of {max_model_len}: use fewer")
    powers = [1 << power for power in range(slots.bit_length())]
    batches = {slots, *(each for power in powers for each in (power, 3 * power // 2) if 0 < each <= slots)}
    lengths = (*(length for length in (64, 256, 1024, 4096, 16384, 65536) if length < room), room)
    return ProfilePlan(tuple(sorted(batches)), lengths, lengths, tokens, repeats)
