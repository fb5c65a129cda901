"""``heddle profile``: measure an engine and write the table that the cost model reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import uvloop

from heddle_dask.cli.shared_options import print_json, shared_options
from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from heddle_dask.cost.measured import MeasuredTable


@click.command("profile")
@click.option("--model", default=None, help="Model directory [default: the shipped tiny-agent].")
@click.option("--engine", default="vllm", show_default=True, help="vllm or emulated.")
@click.option(
    "--engines",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Engines measured at once: what one takes that shares its cores with others.",
)
@click.option("--slots", type=click.IntRange(1), default=8, show_default=True, help="Largest batch.")
@click.option("--tp-degree", type=click.IntRange(1), default=1, show_default=True, help="GPUs of the engine.")
@click.option("--dtype", default="auto", show_default=True, help="Type of the weights, for vLLM.")
@click.option("--max-context-tokens", type=click.IntRange(2), default=None, help="Longest context measured.")
@click.option(
    "--tokens", type=click.IntRange(2), default=128, show_default=True, help="Decoded per sequence and point."
)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Of each point.")
@click.option("--profile", default="tiny-cpu", show_default=True, help="Cost of the emulated engine.")
@click.option("--kv-transfer", is_flag=True, help="Also move contexts between two such engines.")
@click.option("--device", default=None, help="Description of the hardware [default: asked of the machine].")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Table to write [MODEL-tpN.json].")
@click.option("--overwrite", is_flag=True, help="Replace an existing table.")
@shared_options
def profile(
    model: str | None,
    engine: str,
    engines: int,
    slots: int,
    tp_degree: int,
    dtype: str,
    max_context_tokens: int | None,
    tokens: int,
    repeats: int,
    profile: str,
    kv_transfer: bool,
    device: str | None,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    seed: int,
) -> None:
    """Per-token time by batch and context, prefill rate and KV transfer rate of one engine, as a table."""
    from heddle_dask.benchmarks.profile import model_name, plan_for, profile_engine
    from heddle_dask.cli.model_choice import chosen_model, context_limit
    from heddle_dask.cost.engine_cost import load_profile
    from heddle_dask.cost.hardware import check_degree
    from heddle_dask.cost.model_config import read_shape
    from heddle_dask.engines.spec import EngineSpec

    if engine not in ("vllm", "emulated"):
        raise BadInput(f"--engine {engine}: use vllm or emulated")
    chosen = chosen_model(model, engine)
    check_degree(read_shape(chosen), tp_degree)
    if engine == "emulated":
        load_profile(profile, tp_degree)
    limit = context_limit(chosen, max_context_tokens)
    plan = plan_for(slots, limit, tokens=tokens, repeats=repeats)
    target = out or Path(f"{model_name(chosen)}-tp{tp_degree}.json")
    _check_target(target, overwrite)
    table = uvloop.run(
        profile_engine(
            EngineSpec(
                "vllm" if engine == "vllm" else "emulated",
                chosen,
                slots=slots,
                max_model_len=limit,
                dtype=dtype,
                tp_degree=tp_degree,
                seed=seed,
                cost={"profile": profile} if engine == "emulated" else None,
            ),
            plan,
            engines=engines,
            device=device,
            kv_contexts=plan.contexts_to_move() if kv_transfer else (),
            seed=seed,
            on_progress=lambda message: click.echo(message, err=True),
        )
    )
    table.save(target)
    _tell(table, target, as_json)


def _tell(table: MeasuredTable, target: Path, as_json: bool) -> None:
    from heddle_dask.benchmarks.profile import as_json as profile_json
    from heddle_dask.benchmarks.profile import table_lines

    fit = table.fit()
    for line in (*table_lines(table, fit), f"table: {target}"):
        click.echo(line, err=as_json)
    if as_json:
        print_json(profile_json(table, fit, target))


def _check_target(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise BadInput(f"{path} exists: choose another --out, or use --overwrite")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadInput(f"cannot write the table to {path}: give a file in a directory that exists")
