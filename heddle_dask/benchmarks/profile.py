"""Starts engines, measures them as a client sees them, and makes the table that the cost model reads.

What is measured while they run is in `heddle_dask.benchmarks.profile_sweep`, and KV transfers between two engines in
`heddle_dask.benchmarks.kv_transfer`.
"""

from __future__ import annotations

import asyncio
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os import getloadavg, sched_getaffinity
from pathlib import Path
from typing import Any

from heddle_dask.benchmarks.kv_transfer import CHECKED_TOKENS, measure_kv_transfer
from heddle_dask.benchmarks.profile_sweep import Sweep
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import ModelShape, check_degree
from heddle_dask.cost.iteration import BLOCK_TOKENS
from heddle_dask.cost.measured import MeasuredTable, TableFit, TokensPoint
from heddle_dask.cost.model_config import read_shape
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.kinds import engine_kind
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec

START_S = 600.0
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
    engines: int = 1,
    device: str | None = None,
    kv_contexts: Sequence[int] = (),
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> MeasuredTable:
    """Start engines, measure them, end them.

    Parameters
    ----------
    engines
        How many run at once: all do the same at the same time, and the points are their means. What an engine takes
        that shares its cores with others is not what it takes alone.
    device
        Description in words; None: what this machine says of itself.
    kv_contexts
        Lengths of contexts to move between two engines; none: not measured.

    Raises
    ------
    BadInput
        The plan does not fit the engine, the model has no known shape, or the degree does not divide its heads.
    EngineStartError
        An engine did not come up.
    """
    shape = _checked_shape(spec, plan, kv_contexts)
    load_before = _load_average(on_progress)
    async with AsyncExitStack() as stack:
        clients, start_s = await _started(spec, engines, stack, on_progress)
        capacity = (await clients[0].describe()).kv_capacity_tokens
        traits = _traits(await clients[0].configuration(), spec)
        sweep = Sweep(clients, plan.tokens, plan.repeats, seed, on_progress)
        prefill = await sweep.prefill(plan.prompts)
        decode = await sweep.decode(plan.batches, plan.contexts, capacity)
        cached = await sweep.cached_step(traits["block_tokens"], spec.max_model_len)
    kv = await _measure_kv(spec, kv_contexts, plan.repeats, seed, on_progress)
    return MeasuredTable(
        model=model_name(spec.model),
        shape=shape,
        degree=spec.tp_degree,
        device=device or this_device(),
        engine=engine_kind(spec.kind).described(spec),
        date=datetime.now(UTC).date().isoformat(),
        slots=spec.slots,
        decode=tuple(decode),
        prefill=tuple(prefill),
        cached_step=cached,
        kv_transfer=tuple(kv),
        capacity_tokens=capacity,
        start_s=round(start_s, 3),
        engines=engines,
        **traits,
        conditions=f"{plan.tokens} tokens decoded per point, mean of {plan.repeats} repeats"
        + (f" of {engines} engines at once" if engines > 1 else "")
        + ", seeded steps, prompts of unlike lengths, seen by a client over loopback HTTP on the same machine; "
        f"load average {load_before:.1f} before the engine's start",
    )


def _checked_shape(spec: EngineSpec, plan: ProfilePlan, kv_contexts: Sequence[int]) -> ModelShape:
    """The model's shape; refuses what the engine cannot run."""
    shape = read_shape(spec.model)
    check_degree(shape, spec.tp_degree)
    plan.check(spec)
    if kv_contexts and max(kv_contexts) + CHECKED_TOKENS > spec.max_model_len:
        raise BadInput(f"KV context of {max(kv_contexts)} tokens exceeds the engine's {spec.max_model_len}")
    return shape


def _load_average(on_progress: Callable[[str], None]) -> float:
    """Of this machine; says so where other work would be felt."""
    load = getloadavg()[0]
    if load > _QUIET_LOAD * len(sched_getaffinity(0)):
        on_progress(f"the machine is busy (load average {load:.1f}): measure again in a quieter hour")
    return load


async def _started(
    spec: EngineSpec, count: int, stack: AsyncExitStack, on_progress: Callable[[str], None]
) -> tuple[list[EngineClient], float]:
    """Clients of engines that the stack ends, and the seconds until all answered."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heddle-profile-")))
    processes = [EngineProcess(spec, directory / str(number)) for number in range(count)]
    for process in processes:
        stack.push_async_callback(process.stop)
    on_progress(f"starting {count} engines" if count > 1 else "starting the engine")
    began_s = time.perf_counter()
    urls = await asyncio.gather(*(process.start(START_S) for process in processes))
    start_s = time.perf_counter() - began_s
    dialect = engine_kind(spec.kind).dialect
    return [await stack.enter_async_context(EngineClient(url, dialect)) for url in urls], start_s


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


def _traits(configuration: Mapping[str, Any], spec: EngineSpec) -> dict[str, Any]:
    """What the engine says of its blocks and of how it cuts prompts, by the table's names."""
    scheduler, cache = configuration.get("scheduler_config", {}), configuration.get("cache_config", {})
    return {
        "chunk_tokens": int(scheduler.get("max_num_batched_tokens") or spec.max_model_len),
        "chunked_prefill": bool(scheduler.get("enable_chunked_prefill", True)),
        "block_tokens": int(cache.get("block_size") or BLOCK_TOKENS),
    }


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
        f"{p.batch:5d}  {p.context_tokens:14d}  {1e3 * table.whole_s(p):12.2f}  "
        f"{1e3 * cost.decode_token_s(p.batch, p.context_tokens):6.2f}"
        for p in table.decode
    ]
    lines += ["", "prompt tokens  prefill ms      fit"]
    lines += [
        f"{p.tokens:13d}  {1e3 * table.whole_prefill_s(p):10.1f}  "
        f"{1e3 * (fit.request_s + cost.prefill_s(p.tokens)):7.1f}"
        for p in table.prefill
    ]
    lines += [
        "",
        f"iteration: {1e3 * cost.fixed_s:.3f} ms + {1e6 * cost.sequence_s:.1f} µs per sequence + "
        f"{1e9 * cost.context_token_s:.2f} ns per resident token + {1e6 * cost.prefill_token_s:.2f} µs per prompt "
        f"token + {1e3 * cost.prompt_s:.1f} ms with any; {1e3 * fit.request_s:.1f} ms per request",
        f"error of the fit: decoding {fit.decode_error_mean:.1%} mean, {fit.decode_error_max:.1%} worst; "
        f"prefill {fit.prefill_error_mean:.1%} mean, {fit.prefill_error_max:.1%} worst",
    ]
    if table.kind == "operators":
        lines.append("seconds are of kernels on one GPU, and of what the formula adds to them (docs/cost.md)")
    else:
        lines.append(
            f"engine started in {table.start_s:.1f} s; {table.capacity_tokens} tokens of KV in blocks of "
            f"{table.block_tokens}; prompts "
            + ("in chunks" if table.chunked_prefill else "whole")
            + (f"; {table.engines} engines at once" if table.engines > 1 else "")
        )
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
        "engines": table.engines,
        "points": len(table.decode),
        "cost": fit.cost.to_mapping(),
        **rounded,
        "kv_setup_s": fit.kv_setup_s,
        "kv_token_s": fit.kv_token_s,
        "start_s": table.start_s,
        "out": str(out),
    }
