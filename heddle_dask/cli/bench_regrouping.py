"""``heddle bench regrouping``: what merging engines for the tail of a rollout is worth, in virtual time."""

from __future__ import annotations

import click

from heddle_dask.cli.option_groups import COUNT, MAX_CONTEXT_TOKENS, SAMPLES, SEEDS
from heddle_dask.cli.shared_options import print_measured, shared_options
from heddle_dask.core.errors import BadInput


@click.command("regrouping")
@click.option("--model", default="qwen3-14b", show_default=True, help="Name or directory with a config.json.")
@click.option("--cluster", default="hopper8", show_default=True, help="Name or FILE.toml.")
@click.option("--workloads", default="coding,math,search", show_default=True, help="Comma-separated.")
@click.option(
    "--engines",
    default="1,2,4,chosen",
    show_default=True,
    help="Degrees of all engines; chosen: by the resource manager.",
)
@click.option("--predictors", default="oracle,xgboost", show_default=True, help="Comma-separated.")
@click.option(
    "--restarts", default="0,20,60", show_default=True, help="Seconds until a merged engine answers."
)
@click.option("--options", default="", help="KEY=VALUE[,KEY=VALUE]... of regrouping=merge-idle.")
@click.option("--trajectories", type=COUNT, default=None, help="[default: 100 for each GPU]")
@SAMPLES
@MAX_CONTEXT_TOKENS
@SEEDS
@shared_options
def regrouping(
    model: str,
    cluster: str,
    workloads: str,
    engines: str,
    predictors: str,
    restarts: str,
    options: str,
    trajectories: int | None,
    samples: int,
    max_context_tokens: int,
    seeds: int,
    as_json: bool,
    seed: int,
) -> None:
    """Rollouts with and without regrouping, side by side: engines, predictors and seconds of a restart vary."""
    from heddle_dask.benchmarks.regrouping import RegroupConditions, measure_regrouping, regrouping_table
    from heddle_dask.benchmarks.regrouping import as_json as regrouping_json
    from heddle_dask.sim.clusters import cluster_of

    described = cluster_of(cluster)
    count = trajectories or max(samples, 100 * described.gpus // samples * samples)
    conditions = RegroupConditions(
        model,
        described,
        _names(workloads),
        _names(engines),
        _names(predictors),
        _seconds(restarts),
        count,
        samples,
        max_context_tokens,
        options,
    )
    rows = []
    for row in measure_regrouping(conditions, range(seed, seed + seeds)):
        rows.append(row)
        click.echo(
            f"{row.workload}, {row.predictor}, {row.degrees}, seed {row.seed}, restart {row.restart_s:g} s: "
            f"{row.stay_s:,.1f} -> {row.regroup_s:,.1f} s, {row.merges} merges",
            err=True,
        )
    for line in regrouping_table(rows):
        click.echo(line, err=as_json)
    if as_json:
        print_measured(regrouping_json(conditions, rows))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _seconds(text: str) -> list[float]:
    try:
        found = [float(one) for one in _names(text)]
    except ValueError:
        found = []
    if not found or not all(0 <= seconds < float("inf") for seconds in found):
        raise BadInput(f"--restarts {text}: use seconds from 0 up, separated by commas")
    return found
