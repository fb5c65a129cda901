"""What it costs to move a trajectory's KV cache: export, import, and recomputing it instead, by length of context.

Two engines on this machine. Per length and repeat: a random context is computed on the source (its trajectory has just
stepped there), exported, and imported by the target; another one of the same length, which the target has never seen,
is recomputed there. *Export* and *import* are whole calls over HTTP. The next greedy tokens on the target must be the
source's.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, KvTransferFailed, SamplingParams
from heddle_dask.engines.kinds import engine_kind
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec

START_S = 300.0
CHECKED_TOKENS = 32
# Ids that every model has and none takes for an end token.
_FIRST_ID, _LAST_ID = 33, 120


@dataclass(frozen=True, slots=True)
class KvTransferRow:
    """One row of the table. Times in milliseconds: median, and least and most, over the repeats."""

    context_tokens: int
    repeats: int
    export_ms: float
    export_ms_range: tuple[float, float]
    import_ms: float
    import_ms_range: tuple[float, float]
    recompute_ms: float
    recompute_ms_range: tuple[float, float]
    failed: int
    same_tokens: int


@dataclass(slots=True)
class _Samples:
    export_s: list[float] = field(default_factory=list)
    import_s: list[float] = field(default_factory=list)
    recompute_s: list[float] = field(default_factory=list)
    failed: int = 0
    same: int = 0


def engine_spec(kind: str, model: str, max_model_len: int, seed: int = 0) -> EngineSpec:
    """The engines that are measured: float32, so that tokens can be compared.

    Raises
    ------
    BadInput
        The kind is none.
    """
    return EngineSpec(
        kind,
        model,
        slots=8,
        max_model_len=max_model_len,
        dtype="float32",
        seed=seed,
        kv_transfer=True,
    )


async def measure_kv_transfer(
    spec: EngineSpec,
    contexts: Sequence[int],
    *,
    repeats: int = 5,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[KvTransferRow]:
    """Measure all rows on two engines like `spec`.

    Raises
    ------
    BadInput
        A context does not fit.
    EngineStartError
        An engine did not come up.
    """
    if max(contexts) + CHECKED_TOKENS > spec.max_model_len:
        raise BadInput(
            f"context of {max(contexts)} tokens and {CHECKED_TOKENS} more exceed the model's {spec.max_model_len}"
        )
    rng = random.Random(seed)
    rows = []
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heddle-kv-")))
        on_progress("starting two engines")
        processes = [EngineProcess(spec, directory / name) for name in ("source", "target")]
        for process in processes:
            stack.push_async_callback(process.stop)
        urls = await asyncio.gather(*(process.start(START_S) for process in processes))
        dialect = engine_kind(spec.kind).dialect
        source, target = [await stack.enter_async_context(EngineClient(url, dialect)) for url in urls]
        on_progress("warming up")
        await _measure(source, target, [contexts[0]] * 2, rng, _Samples())
        for length in contexts:
            on_progress(f"{length} tokens")
            samples = _Samples()
            await _measure(source, target, [length] * repeats, rng, samples)
            rows.append(_row(length, repeats, samples))
    return rows


async def _measure(
    source: EngineClient, target: EngineClient, lengths: Sequence[int], rng: random.Random, samples: _Samples
) -> None:
    for index, length in enumerate(lengths):
        tokens, other = [[rng.randint(_FIRST_ID, _LAST_ID) for _ in range(length)] for _ in range(2)]
        name = f"kv-{length}-{index}-{rng.getrandbits(32):08x}"
        await source.warm(tokens, f"{name}-step")
        try:
            began_s = time.perf_counter()
            handle = await source.export_kv(f"{name}-export", tokens)
            exported_s = time.perf_counter()
            await target.import_kv(f"{name}-import", tokens, handle)
        except KvTransferFailed:
            samples.failed += 1
        else:
            samples.import_s.append(time.perf_counter() - exported_s)
            samples.export_s.append(exported_s - began_s)
            samples.same += await _next(source, tokens, name) == await _next(target, tokens, name)
        samples.recompute_s.append((await target.warm(other, f"{name}-warm")).seconds)


async def _next(client: EngineClient, tokens: Sequence[int], name: str) -> tuple[int, ...]:
    sampling = SamplingParams(CHECKED_TOKENS, temperature=0.0, ignore_eos=True)
    return (await client.generate(GenerateRequest(f"{name}-check", tokens, sampling))).token_ids


def _row(length: int, repeats: int, samples: _Samples) -> KvTransferRow:
    export, import_, recompute = map(_milliseconds, (samples.export_s, samples.import_s, samples.recompute_s))
    return KvTransferRow(
        length,
        repeats,
        *export,
        *import_,
        *recompute,
        failed=samples.failed,
        same_tokens=samples.same,
    )


def _milliseconds(seconds: Sequence[float]) -> tuple[float, tuple[float, float]]:
    if not seconds:
        return float("nan"), (float("nan"), float("nan"))
    ms = 1000 * np.array(seconds)
    return round(float(np.median(ms)), 1), (round(float(ms.min()), 1), round(float(ms.max()), 1))


def as_json(rows: Sequence[KvTransferRow]) -> dict[str, object]:
    """The JSON object of ``heddle bench kv-transfer``; null where every transfer failed."""
    return {"rows": [{key: _nan_is_null(value) for key, value in asdict(row).items()} for row in rows]}


def _nan_is_null(value: object) -> object:
    if isinstance(value, tuple):
        return [_nan_is_null(item) for item in value]
    return None if isinstance(value, float) and np.isnan(value) else value
