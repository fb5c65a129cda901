"""``python -m benchmarks gpu`` (``make gpu``): its options."""

from __future__ import annotations

import json
from pathlib import Path

import click

from heddle_dask.core.errors import BadInput
from heddle_dask.engines.gpus import present_gpus
from heddle_dask.engines.vllm_command import INSTALL_GPU_BUILD, installed_vllm_build

NAMES = ("conformance", "rollout", "profile", "live", "weights", "train")


@click.command("gpu")
@click.option("--model", default=None, help="Model directory [default: the shipped agent].")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("gpu-rows.jsonl"),
    show_default=True,
    help="JSON lines; a row is added when a stage ends.",
)
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Some stages [default: all].")
@click.option("--cpu", is_flag=True, help="Try the stages on a machine without GPUs, with less work.")
@click.pass_context
def gpu(ctx: click.Context, model: str | None, out: Path, only: tuple[str, ...], cpu: bool) -> None:
    """Check and measure on a GPU: conformance, the main job, a profile, live arms, new weights, training steps."""
    import os

    from benchmarks.gpu_stages import run_stages, stages

    if not cpu and (installed_vllm_build() == "cpu" or not present_gpus(os.environ)):
        raise BadInput(f"no GPU that vLLM can use: {INSTALL_GPU_BUILD} on a machine with one, or give --cpu")
    out = out.absolute()
    logs = out.with_name(f"{out.name}.logs")
    logs.mkdir(parents=True, exist_ok=True)
    chosen = [stage for stage in stages(model, logs, on_gpu=not cpu) if stage.name in (only or NAMES)]
    failed = []
    for row in run_stages(chosen, logs, lambda line: click.echo(line, err=True)):
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        click.echo(f"{row['stage']}: exit code {row['exit_code']} after {row['seconds']} s")
        if row["exit_code"] != 0:
            failed.append(row["stage"])
            click.echo("\n".join(f"    {line[:200]}" for line in row["last_lines"]))
    ctx.exit(1 if failed else 0)
