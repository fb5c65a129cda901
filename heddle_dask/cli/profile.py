"""``heddle profile``: measure an engine and write the table that the cost model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heddle_dask.cli.engine_option import engine_option, gpu_options, parsed_vllm_options
from heddle_dask.cli.shared_options import COUNT, POSITIVE, TOKENS, print_json, shared_options
from heddle_dask.core.errors import BadInput
from heddle_dask.engines.spec import DEFAULT_KIND

if TYPE_CHECKING:
    from heddle_dask.cost.measured import MeasuredTable
    from heddle_dask.cost.table_fit import TableFit
    from heddle_dask.engines.spec import EngineOptions, EngineSpec


@click.command("profile")
@click.option(
    "--model",
    default=None,
    help="Model directory, for operators also a name [default: the shipped tiny-agent].",
)
@engine_option(DEFAULT_KIND, "operators")
@click.option(
    "--engines",
    type=COUNT,
    default=1,
    show_default=True,
    help="Engines measured at once, for engines that share cores.",
)
@click.option("--slots", type=COUNT, default=None, help="Largest batch [default: 8, of operators 256].")
@click.option("--tp-degree", type=COUNT, default=1, show_default=True, help="GPUs of the engine.")
@click.option("--dtype", default="auto", show_default=True, help="Type of the weights, for vLLM.")
@gpu_options
@click.option(
    "--max-context-tokens",
    type=TOKENS,
    default=None,
    help="Longest context measured [default: the model's, at most 4096; of operators 32768].",
)
@click.option("--tokens", type=TOKENS, default=128, show_default=True, help="Decoded per sequence and point.")
@click.option("--repeats", type=COUNT, default=None, help="Of each point [default: 5, of operators 20].")
@click.option(
    "--time-limit",
    type=POSITIVE,
    default=None,
    help="Seconds of measuring an engine that runs; fewer points where all take longer [default: 180].",
)
@click.option("--profile", default="tiny-cpu", show_default=True, help="Cost of the emulated engine.")
@click.option("--kv-transfer", is_flag=True, help="Also move contexts between two such engines.")
@click.option("--torch-device", default="cuda", show_default=True, help="operators: where torch runs.")
@click.option("--device", default=None, help="Description of the hardware [default: asked of the machine].")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Table to write [MODEL-tpN.json].")
@click.option("--overwrite", is_flag=True, help="Replace an existing table.")
@shared_options
def profile(
    model: str | None,
    engine: str,
    engines: int,
    slots: int | None,
    tp_degree: int,
    dtype: str,
    max_context_tokens: int | None,
    tokens: int,
    repeats: int | None,
    time_limit: float | None,
    profile: str,
    kv_transfer: bool,
    torch_device: str,
    device: str | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    seed: int,
    **gpu_values: Any,
) -> None:
    """Measure the time per token by batch and context, prefill and KV transfer of one engine, and write a table.

    With --engine operators no engine is started: a model's kernels are timed on one GPU with torch alone, without
    weights.
    """
    from heddle_dask.engines.spec import EngineSpec, engine_kind
    from heddle_dask.profiling.engines import model_name

    if engine == "operators":
        if engines > 1 or kv_transfer or dtype != "auto" or time_limit or any(gpu_values.values()):
            raise BadInput(
                "--engine operators starts no engine: leave out --engines, --kv-transfer, --dtype, --time-limit and "
                "options of GPUs"
            )
        sizes = {"slots": slots, "max_context_tokens": max_context_tokens, "repeats": repeats}
        chosen, measured = _operators(model, tp_degree, torch_device, device, sizes, seed)
    else:
        base = engine_kind(engine).options_for({"profile": profile})
        options = parsed_vllm_options(engine, gpu_values, base)
        chosen, limit = _engine_model(model, engine, max_context_tokens, tp_degree, profile, options)
        per_gpu = gpu_values["engines_per_gpu"] or 1
        spec = EngineSpec(
            engine,
            chosen,
            slots=slots or 8,
            max_model_len=limit,
            dtype=dtype,
            tp_degree=tp_degree,
            seed=seed,
            engines_per_gpu=per_gpu,
            options=options or base,
        )
        measured = _of_engine(spec, tokens, repeats or 5, engines, device, kv_transfer, time_limit)
    target = out or Path(f"{model_name(chosen)}-tp{tp_degree}.json")
    _check_target(target, overwrite)
    table = measured()
    table.save(target)
    _tell(table, target, as_json)


def _engine_model(
    model: str | None,
    engine: str,
    max_context_tokens: int | None,
    tp_degree: int,
    profile: str,
    options: EngineOptions | None,
) -> tuple[str, int]:
    """The model's directory, and the longest context; refuses a model or degree that cannot run."""
    from heddle_dask.cli.engine_option import chosen_model, context_limit
    from heddle_dask.cost.engine_cost import load_profile
    from heddle_dask.cost.hardware import check_degree
    from heddle_dask.cost.model_config import read_shape
    from heddle_dask.engines.spec import engine_kind

    chosen = chosen_model(model, engine, options)
    check_degree(read_shape(chosen), tp_degree)
    if engine_kind(engine).takes_cost:
        load_profile(profile, tp_degree)
    return chosen, context_limit(chosen, max_context_tokens)


def _of_engine(
    spec: EngineSpec,
    tokens: int,
    repeats: int,
    engines: int,
    device: str | None,
    kv_transfer: bool,
    time_limit_s: float | None,
) -> Callable[[], MeasuredTable]:
    import uvloop

    from heddle_dask.profiling.engines import LIMIT_S, profile_engine
    from heddle_dask.profiling.plan import plan_for

    plan = plan_for(spec.named_slots, spec.named_context_tokens, tokens=tokens, repeats=repeats)
    return lambda: uvloop.run(
        profile_engine(
            spec,
            plan,
            engines=engines,
            device=device,
            kv_contexts=plan.contexts_to_move() if kv_transfer else (),
            seed=spec.seed,
            limit_s=time_limit_s or LIMIT_S,
            on_progress=lambda message: click.echo(message, err=True),
        )
    )


def _operators(
    model: str | None,
    tp_degree: int,
    torch_device: str,
    device: str | None,
    sizes: Mapping[str, int | None],
    seed: int,
) -> tuple[str, Callable[[], MeasuredTable]]:
    """The model's name or directory, and a function that measures its kernels."""
    from heddle_dask.cli.engine_option import shipped_model
    from heddle_dask.cost.hardware import check_degree
    from heddle_dask.cost.model_config import shape_of_config
    from heddle_dask.cost.published import config_of
    from heddle_dask.profiling.engines import model_name

    chosen = model or str(shipped_model())
    config = config_of(chosen)
    check_degree(shape_of_config(config), tp_degree)
    try:
        from heddle_dask.profiling import operators
    except ModuleNotFoundError as error:
        raise BadInput(f"--engine operators needs {error.name}: `pip install {error.name}`") from None
    operators.check_device(torch_device)
    plan = operators.operators_plan(**{name: size for name, size in sizes.items() if size is not None})
    name = model_name(chosen)
    return chosen, lambda: operators.measure_operators(name, config, tp_degree, torch_device, plan, seed=seed)


def _tell(table: MeasuredTable, target: Path, as_json: bool) -> None:
    from heddle_dask.cost.table_fit import fit_table

    fit = fit_table(table)
    for line in (*_table_lines(table, fit), f"table: {target}"):
        click.echo(line, err=as_json)
    if as_json:
        print_json(_result(table, fit, target))


def _check_target(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise BadInput(f"{path} exists: choose another --out, or use --overwrite")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadInput(f"cannot write the table to {path}: give a file in a directory that exists")


def _table_lines(table: MeasuredTable, fit: TableFit) -> list[str]:
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


def _result(table: MeasuredTable, fit: TableFit, out: Path) -> dict[str, object]:
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
