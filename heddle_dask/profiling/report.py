"""A measured table and its fit, as lines for the terminal and as JSON."""

from __future__ import annotations

from pathlib import Path

from heddle_dask.cost.measured import MeasuredTable, TableFit


def table_lines(table: MeasuredTable, fit: TableFit) -> list[str]:
    """The points beside the fit, and the terms of the fit."""
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
