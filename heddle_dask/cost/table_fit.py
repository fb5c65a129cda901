"""The cost of an engine, fitted to the points of a measured table: least absolute relative deviations, none negative.

Decoding comes first: fixed, per sequence, per resident token and, for a mixture of experts, by the experts that the
batch visits. Then the terms of prompts, given these. What a prompt takes beyond its tokens and iterations has two
causes, which differ in what other prompts feel of it:

- Prompts in chunks (engines on GPUs): many prompts at once, and prompts beside decoding sequences, tell the time that
  adds up, `per_prompt_s` of the cost. A table without such points gets `PER_PROMPT_S`. What a prompt alone takes
  beyond that is `alone_s` of the fit, a delay that overlaps with other work.
- Whole prompts (vLLM on CPUs): kernels are compiled for each new shape, and everything waits: `prompt_s` of the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from heddle_dask.cost.hardware import PER_PROMPT_S, SEQUENCE_S
from heddle_dask.cost.iteration import EngineCost
from heddle_dask.cost.least_squares import non_negative_least_deviations
from heddle_dask.cost.measured import MeasuredTable, TokensPoint


@dataclass(frozen=True, slots=True)
class TableFit:
    """An engine's cost fitted to a table, with the errors of the fit.

    Attributes
    ----------
    request_s
        Time of a request outside the engine: measured, else the time of single prompts beyond their tokens and
        iterations.
    decode_error_mean, decode_error_max, prefill_error_mean, prefill_error_max
        Errors of the fit relative to the measured values; those of prefill include many prompts at once and prompts
        beside decoding sequences.
    kv_setup_s, kv_token_s
        Seconds of a KV transfer: fixed, and per token; None when not measured.
    alone_s
        Seconds of a prompt, or of many sent at once, beyond all this: other work of the engine goes on meanwhile.
    """

    cost: EngineCost
    request_s: float
    decode_error_mean: float
    decode_error_max: float
    prefill_error_mean: float
    prefill_error_max: float
    kv_setup_s: float | None = None
    kv_token_s: float | None = None
    alone_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Prompts:
    """One measurement with prompts, as an equation of the unknown terms.

    Attributes
    ----------
    rest_s, seconds
        Measured seconds without the known terms, and with them.
    prompts, new_tokens, alone
        Factors of `per_prompt_s`, `prefill_token_s` and `alone_s` (or `prompt_s`).
    """

    rest_s: float
    seconds: float
    prompts: float
    new_tokens: float
    alone: float


def fit_table(table: MeasuredTable, capacity_tokens: int | None = None) -> TableFit:
    """Fit a cost; `capacity_tokens` in place of the table's."""
    base = EngineCost(
        **_decode_terms(table),
        chunk_tokens=table.chunk_tokens,
        capacity_tokens=capacity_tokens or table.capacity_tokens or EngineCost(0.0).capacity_tokens,
        block_tokens=table.block_tokens,
        whole_prompts=not table.chunked_prefill,
    )
    way_s = None
    if table.cached_step is not None:  # its prompt is one token, so its own work is part of the way
        way_s = max(0.0, table.cached_step.seconds - base.decode_token_s(1, table.cached_step.tokens))
    points = _prompt_points(table, base, way_s or 0.0)
    rate, per_prompt_s, beside_s = _prefill_terms(table, points, known_way=way_s is not None)
    prompt_s = beside_s if way_s is not None and not table.chunked_prefill else 0.0
    alone_s = beside_s - prompt_s if way_s is not None else 0.0
    cost = replace(base, prefill_token_s=rate, prompt_s=prompt_s, per_prompt_s=per_prompt_s)
    decode = [abs(cost.decode_token_s(p.batch, p.context_tokens) / table.whole_s(p) - 1) for p in table.decode]
    prefill = [
        abs((rate * p.new_tokens + per_prompt_s * p.prompts + beside_s * p.alone - p.rest_s) / p.seconds)
        for p in points
    ]
    setup, per_token = _line(table.kv_transfer) if table.kv_transfer else (None, None)
    return TableFit(
        cost,
        beside_s if way_s is None else way_s,
        sum(decode) / len(decode),
        max(decode),
        sum(prefill) / len(prefill),
        max(prefill),
        setup,
        per_token,
        alone_s,
    )


def _decode_terms(table: MeasuredTable) -> dict[str, float]:
    share = table.shape.expert_share
    rows = np.array(
        [[1.0, p.batch, p.context_tokens, 1.0 - (1.0 - share) ** p.batch] for p in table.decode],
        dtype=float,
    )
    if not share:
        rows = rows[:, :3]
    # For operators, the formula's share is known and not fitted, but errors are relative to the whole time.
    whole = np.array([table.whole_s(p) for p in table.decode])
    measured = np.array([p.seconds for p in table.decode])
    found = non_negative_least_deviations(rows / whole[:, None], measured / whole)
    spared_s = float(found[3]) if share else 0.0
    return {
        "fixed_s": float(found[0]) + spared_s + table.beside_kernels_s(),
        "sequence_s": float(found[1]) + (SEQUENCE_S if table.kind == "operators" else 0.0),
        "context_token_s": float(found[2]),
        "spared_s": spared_s,
        "expert_share": share,
    }


def _prompt_points(table: MeasuredTable, base: EngineCost, way_s: float) -> list[_Prompts]:
    """The measurements with prompts: alone, many at once, and beside decoding sequences."""
    points = []
    # With whole prompts, one time of a new shape per iteration.
    chunk_tokens = math.inf if table.cached_step is None or table.chunked_prefill else table.chunk_tokens
    for single in table.prefill:
        seconds, tokens = table.whole_prefill_s(single), single.tokens
        rest_s = seconds - way_s - base.prefill_s(tokens)
        points.append(_Prompts(rest_s, seconds, 1, tokens, math.ceil(tokens / chunk_tokens) or 1))
    for burst in table.bursts:
        tokens = burst.requests * burst.new_tokens
        known_s = way_s + base.prefill_s(tokens, burst.requests * burst.cached_tokens)
        points.append(_Prompts(burst.seconds - known_s, burst.seconds, burst.requests, tokens, 1))
    for mixed in table.mixed:
        known_s = mixed.tokens * base.decode_token_s(mixed.decoding, mixed.context_tokens)
        rest_s = mixed.seconds - known_s
        points.append(_Prompts(rest_s, mixed.seconds, mixed.prompts, mixed.prompts * mixed.new_tokens, 0))
    return points


def _prefill_terms(table: MeasuredTable, points: Sequence[_Prompts], *, known_way: bool) -> tuple[float, float, float]:
    """Seconds per prompt token, seconds per prompt, and what remains of a prompt alone."""
    seconds = np.array([p.seconds for p in points])
    rest_s = np.array([p.rest_s for p in points])
    columns = np.array([[p.new_tokens, p.prompts, p.alone] for p in points], dtype=float)
    per_prompt_s = 0.0
    if table.bursts or table.mixed:
        # The three kinds of points count the same, however many there are of each.
        kinds = [len(table.prefill), len(table.bursts), len(table.mixed)]
        weights = np.repeat([len(points) / max(1, count) for count in kinds], kinds) / seconds
        found = non_negative_least_deviations(columns * weights[:, None], rest_s * weights)
        return float(found[0]), float(found[1]), float(found[2])
    if table.kind == "operators" or (table.chunked_prefill and known_way):
        per_prompt_s = PER_PROMPT_S
    if table.kind == "engine":
        rest_s = rest_s - per_prompt_s
    used = [0, 2] if table.kind == "engine" and len(points) > 1 else [0]
    found = non_negative_least_deviations(columns[:, used] / seconds[:, None], rest_s / seconds)
    return float(found[0]), per_prompt_s, float(found[1]) if len(found) > 1 else 0.0


def _line(points: Sequence[TokensPoint]) -> tuple[float, float]:
    """Fixed seconds and seconds per token closest to the points, by relative error."""
    seconds = np.array([p.seconds for p in points])
    rows = np.array([[1.0, float(p.tokens)] for p in points])
    found = non_negative_least_deviations(rows / seconds[:, None], np.ones(len(points)))
    return float(found[0]), float(found[1])
