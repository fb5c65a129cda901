"""Starts engines, measures them as a client, and makes the table for the cost model.

The measurements on running engines are in `heddle_dask.profiling.sweep`, and KV transfers between two engines in
`heddle_dask.profiling.plan`.
"""

from __future__ import annotations

import asyncio
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from os import environ, getloadavg, sched_getaffinity
from pathlib import Path
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.cost.hardware import ModelShape, check_degree
from heddle_dask.cost.iteration import BLOCK_TOKENS, EngineCost
from heddle_dask.cost.measured import BurstPoint, MeasuredTable, MixedPoint
from heddle_dask.cost.model_config import read_shape
from heddle_dask.engines.client import EngineClient
from heddle_dask.engines.gpus import installed_gpus, usable_gpus
from heddle_dask.engines.process import EngineProcess
from heddle_dask.engines.spec import EngineSpec, engine_kind
from heddle_dask.profiling.duration import MeasuredEngine, cost_of_points, duration_told, plan_within
from heddle_dask.profiling.plan import STEP_TOKENS, ProfilePlan, measure_kv_transfer
from heddle_dask.profiling.sweep import Sweep

START_S = 600.0
LIMIT_S = 180.0
"""Seconds that measurements take at most, unless another limit is given."""
# Decoded per sequence, and the longest prompt, of the points that tell how long the others will take.
_FIRST_TOKENS, _FIRST_PROMPT = 32, 4096
# Load average per core above which other processes disturb the measurement.
_QUIET_LOAD = 0.3


async def profile_engine(
    spec: EngineSpec,
    plan: ProfilePlan,
    *,
    engines: int = 1,
    device: str | None = None,
    kv_contexts: Sequence[int] = (),
    seed: int = 0,
    limit_s: float = LIMIT_S,
    on_progress: Callable[[str], None] = lambda message: None,
) -> MeasuredTable:
    """Start engines, measure them, and stop them.

    Parameters
    ----------
    engines
        Number of concurrent engines. All do the same at the same time, and the points are their means: an engine that
        shares its cores with others is slower than alone.
    device
        Description of the hardware; None: `this_device`.
    kv_contexts
        Lengths of contexts to move between two engines; empty: not measured.
    limit_s
        Seconds after which the measurements of running engines end, as computed before: the plan is cut to that. The
        start and moves of KV are not counted.

    Raises
    ------
    BadInput
        The plan does not fit the engine, the model has no known shape, or the degree does not divide its heads.
    EngineStartError
        An engine did not start.
    """
    shape = _checked_shape(spec, plan, kv_contexts)
    load_before = _load_average(on_progress)
    on_progress(f"measuring is planned to take at most {limit_s:g} s after the start (--time-limit)")
    async with AsyncExitStack() as stack:
        clients, start_s = await _started(spec, engines, stack, on_progress)
        capacity = (await clients[0].describe()).kv_capacity_tokens
        traits = _traits(await clients[0].configuration(), spec)
        first = await _rough_cost(spec, plan, clients, capacity, seed)
        measured = MeasuredEngine(
            first, spec.named_slots, spec.named_context_tokens, capacity, bool(traits["chunked_prefill"])
        )
        asked, plan = plan, plan_within(plan, measured, limit_s)
        on_progress(duration_told(plan, asked, measured, limit_s))
        sweep = Sweep(clients, plan.tokens, plan.repeats, seed, on_progress)
        prefill = await sweep.prefill(plan.prompts)
        decode = await sweep.decode(plan.batches, plan.contexts, capacity)
        cached = await sweep.cached_step(traits["block_tokens"], spec.named_context_tokens)
        bursts: list[BurstPoint] = []
        mixed: list[MixedPoint] = []
        if traits["chunked_prefill"]:  # whole prompts overlap with nothing
            bursts = await sweep.bursts(spec.named_slots, spec.named_context_tokens, capacity)
            mixed = await sweep.mixed(spec.named_slots, spec.named_context_tokens, capacity)
    kv = await measure_kv_transfer(spec, kv_contexts, plan.repeats, seed, on_progress)
    return MeasuredTable(
        model=model_name(spec.model),
        shape=shape,
        degree=spec.tp_degree,
        device=device or this_device(),
        engine=engine_kind(spec.kind).described(spec),
        date=datetime.now(UTC).date().isoformat(),
        slots=spec.named_slots,
        decode=tuple(decode),
        prefill=tuple(prefill),
        cached_step=cached,
        bursts=tuple(bursts),
        mixed=tuple(mixed),
        kv_transfer=tuple(kv),
        capacity_tokens=capacity,
        start_s=round(start_s, 3),
        engines=engines,
        **traits,
        conditions=_conditions(plan, engines, load_before),
    )


async def _rough_cost(
    spec: EngineSpec, plan: ProfilePlan, clients: Sequence[EngineClient], capacity_tokens: int, seed: int
) -> EngineCost:
    """What the engine is believed to cost, else what its first points say."""
    # In a thread: on GPUs it asks nvidia-smi.
    believed = await asyncio.to_thread(engine_kind(spec.kind).believed_cost, spec)
    if believed is not None:
        return believed
    # Its prompts must not be those of the measurements, which are not cached before.
    first = Sweep(clients, min(_FIRST_TOKENS, plan.tokens), 1, -1 - seed, lambda message: None)
    longest = max(_FIRST_PROMPT, plan.prompts[0])
    batches = sorted({plan.batches[0], plan.batches[-1]})
    decode = await first.decode(batches, plan.contexts[:1], capacity_tokens)
    (prefill,) = await first.prefill([max(length for length in plan.prompts if length <= longest)])
    return cost_of_points(decode, prefill)


def _checked_shape(spec: EngineSpec, plan: ProfilePlan, kv_contexts: Sequence[int]) -> ModelShape:
    shape = read_shape(spec.model)
    check_degree(shape, spec.tp_degree)
    plan.check(spec)
    if kv_contexts and max(kv_contexts) + STEP_TOKENS > spec.named_context_tokens:
        raise BadInput(f"KV context of {max(kv_contexts)} tokens exceeds the engine's {spec.named_context_tokens}")
    return shape


def _load_average(on_progress: Callable[[str], None]) -> float:
    """The load average of this machine; warns if other processes would disturb the measurement."""
    load = getloadavg()[0]
    if load > _QUIET_LOAD * len(sched_getaffinity(0)):
        on_progress(f"the machine is busy (load average {load:.1f}): measure again in a quieter hour")
    return load


def _tell_phase(on_progress: Callable[[str], None], number: int, phase: str) -> None:
    on_progress(f"engine {number}: {phase}")


def on_gpus_of_their_own(spec: EngineSpec, count: int, variables: Mapping[str, str]) -> list[EngineSpec]:
    """So many engines, with the GPUs of each where they use some and name none."""
    if spec.devices or not engine_kind(spec.kind).uses_gpus():
        return [spec] * count
    gpus, degree = usable_gpus(variables), spec.tp_degree
    firsts = [number // spec.engines_per_gpu * degree for number in range(count)]
    if firsts[-1] + degree > len(gpus):
        raise BadInput(
            f"{count} engines need {firsts[-1] + degree} GPUs, this process sees {len(gpus)}: use fewer engines, "
            "or more --engines-per-gpu"
        )
    return [replace(spec, devices=gpus[first : first + degree]) for first in firsts]


async def _started(
    spec: EngineSpec, count: int, stack: AsyncExitStack, on_progress: Callable[[str], None]
) -> tuple[list[EngineClient], float]:
    """Clients of engines that `stack` stops, and the seconds until all engines answered."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heddle-profile-")))
    specs = on_gpus_of_their_own(spec, count, environ)
    processes = [
        EngineProcess(each, directory / str(number), on_phase=partial(_tell_phase, on_progress, number))
        for number, each in enumerate(specs)
    ]
    for process in processes:
        stack.push_async_callback(process.stop)
    on_progress(f"starting {count} engines" if count > 1 else "starting the engine")
    began_s = time.perf_counter()
    addresses = await asyncio.gather(*(process.start(START_S) for process in processes))
    start_s = time.perf_counter() - began_s
    dialect = engine_kind(spec.kind).dialect
    return [await stack.enter_async_context(EngineClient(address, dialect)) for address in addresses], start_s


def _traits(configuration: Mapping[str, Any], spec: EngineSpec) -> dict[str, Any]:
    """Block size and chunked prefill as reported by the engine, by the names of the table's fields."""
    scheduler, cache = configuration.get("scheduler_config", {}), configuration.get("cache_config", {})
    return {
        "chunk_tokens": int(scheduler.get("max_num_batched_tokens") or spec.named_context_tokens),
        "chunked_prefill": bool(scheduler.get("enable_chunked_prefill", True)),
        "block_tokens": int(cache.get("block_size") or BLOCK_TOKENS),
    }


def _conditions(plan: ProfilePlan, engines: int, load_before: float) -> str:
    at_once = f" of {engines} engines at once" if engines > 1 else ""
    return (
        f"{plan.tokens} tokens decoded per point, mean of {plan.repeats} repeats{at_once}, seeded steps, prompts of "
        "unlike lengths, seen by a client over loopback HTTP on the same machine; "
        f"load average {load_before:.1f} before the engine's start"
    )


def model_name(directory: str) -> str:
    """The name of a model directory; the parent's name if the directory is called checkpoint."""
    path = Path(directory)
    return path.parent.name if path.name == "checkpoint" else path.name


def this_device() -> str:
    if gpus := installed_gpus():
        return f"{len(gpus)} x {gpus[0].name}"
    return f"{len(sched_getaffinity(0))} CPU cores ({platform.machine()})"
