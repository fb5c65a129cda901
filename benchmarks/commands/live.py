"""``python -m benchmarks live``: presets side by side on real or emulated engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import uvloop

from benchmarks.commands.measured_live import measured_live
from benchmarks.row_file import ROWS_OUT
from benchmarks.tables import print_measured
from heddle_dask.cli.engine_option import gpu_options
from heddle_dask.cli.shared_options import COUNT, WholeNumber, shared_options
from heddle_dask.engines.collector import collect_seldom

if TYPE_CHECKING:
    from benchmarks.live_setup import LiveRow
    from heddle_dask.sim.rollout import Arm

DEFAULT_ARMS = "heddle slime verl verl-hybrid sticky-least-loaded cache-aware autellix heddle-paper"
ROUTER_ARMS = (
    "vllm-router/round_robin vllm-router/cache_aware vllm-router/cache_aware:balance-abs-threshold=4"
    " vllm-router/sticky_least_loaded"
)


@click.command("live")
@measured_live(token_scale=0.05, engine="vllm")
@click.option("--dtype", default="auto", show_default=True, help="Type of the weights, for vLLM.")
@gpu_options
@click.option("--table", default="", help="Measured table of an engine, name or file, in place of the profile.")
@click.option(
    "--kv-capacity",
    type=WholeNumber(0, 2**31 - 1),
    default=0,
    help="Tokens of KV of an emulated engine, in place of the profile's.",
)
@click.option("--warm/--cold", default=True, show_default=True, help="Predictors learn from other groups first.")
@click.option("--kv-transfer/--no-kv-transfer", default=False, help="Engines hand over KV caches.")
@click.option(
    "--arm",
    multiple=True,
    help="preset:part=name,option=value:…, or vllm-router/policy [default: all presets, and the router's policies].",
)
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Runs of each arm.")
@click.option(
    "--simulated",
    is_flag=True,
    help="Each arm once in simulated time, on engines of the same cost: to search a limit of live trajectories.",
)
@ROWS_OUT
@shared_options
def live(
    trace: tuple[Path, ...],
    tasks: int,
    token_scale: float,
    tool_scale: float,
    engine: str,
    engines: int,
    slots: int,
    profile: str,
    time_scale: float,
    max_context: int,
    table: str,
    kv_capacity: int,
    warm: bool,
    kv_transfer: bool,
    arm: tuple[str, ...],
    repeats: int,
    simulated: bool,
    out: Path | None,
    model: str | None,
    as_json: bool,
    seed: int,
    dtype: str,
    **gpu_values: Any,
) -> None:
    """Throughput, makespan and share of the lower bound, arm against arm on the same trajectories."""
    from benchmarks.live import measure_live
    from benchmarks.live_rows import LiveRows, conditions_text
    from benchmarks.live_setup import LiveRow, Workload, fleet_of
    from benchmarks.live_simulated import simulate_live
    from benchmarks.runner import figures_of
    from heddle_dask.cli.engine_option import chosen_model, parsed_vllm_options

    arms = _arms(arm or (*DEFAULT_ARMS.split(), *(() if simulated else ROUTER_ARMS.split())))
    workloads = [Workload(path, tasks, token_scale, tool_scale, seed) for path in trace]
    fleet = fleet_of(
        engine,
        str(chosen_model(model, engine, parsed_vllm_options(engine, gpu_values))),
        engines,
        slots,
        profile=profile,
        table=table,
        time_scale=time_scale,
        kv_transfer=kv_transfer,
        max_model_len=max_context,
        kv_capacity_tokens=kv_capacity,
        dtype=dtype,
        gpu_values=gpu_values,
    )

    conditions = conditions_text(fleet, workloads[0], warm=warm)
    common = {"kind": "live", "seed": seed, "simulated": simulated, "conditions": conditions}
    file = LiveRows(out, common, partial(figures_of, LiveRow), _told)
    if simulated:
        simulate_live(workloads, fleet, arms, warm=warm, on_row=file.add, has=file.has)
    else:
        collect_seldom()
        uvloop.run(measure_live(workloads, fleet, arms, repeats=repeats, warm=warm, on_row=file.add, has=file.has))
    _report(file.rows, as_json=as_json)


def _told(row: LiveRow) -> str:
    return f"{row.workload} {row.arm} {row.repeat}: {row.makespan_s:.1f} s, {row.tokens_per_s:.0f} tokens/s"


def _report(rows: Sequence[LiveRow], *, as_json: bool) -> None:
    from benchmarks.live import cpu_per_step_ms, outlasted_moves, summary

    click.echo("workload  arm  tokens/s median (least-most)  share of bound", err=as_json)
    for workload, name, middle, least, most, share in summary(rows):
        click.echo(f"{workload}  {name:24s}  {middle:8.0f} ({least:.0f}-{most:.0f})  {share:6.1%}", err=as_json)
    for workload, name, kinds in cpu_per_step_ms(rows):
        each = ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds.items())
        click.echo(f"{workload}  {name:24s}  CPU ms of a step and its tool call: {each}", err=as_json)
    for workload, name, moves, outlasted, late in outlasted_moves(rows):
        click.echo(
            f"{workload}  {name:24s}  {moves} moves, {outlasted} shorter than their tool call: "
            f"{outlasted - late} hidden",
            err=as_json,
        )
    if as_json:
        print_measured({"rows": [asdict(row) for row in rows]})


def _arms(texts: Sequence[str]) -> list[Arm]:
    """Parse the arms and check each, before anything is started."""
    from benchmarks.live_setup import ARM_PREFIX
    from benchmarks.router import check_router
    from heddle_dask.sim.rollout import Arm
    from heddle_dask.strategies.presets import build_strategies

    arms = [Arm.parse(text) for text in texts]
    for arm in arms:
        if arm.preset.startswith(ARM_PREFIX):
            check_router(arm.preset.removeprefix(ARM_PREFIX), arm.overrides)
        else:
            build_strategies(arm.preset, overrides=arm.overrides)
    return arms
