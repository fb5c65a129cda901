"""``heddle bench actions``: tool and reward calls on shared pools, against static ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heddle_dask.cli.option_groups import SEEDS
from heddle_dask.cli.shared_options import print_measured, shared_options

if TYPE_CHECKING:
    from heddle_dask.benchmarks.actions.cpu_job import CpuFigures, CpuJob
    from heddle_dask.benchmarks.actions.cpu_play import CpuPlay
    from heddle_dask.benchmarks.actions.rows import ActionRow


@click.command("actions")
@click.option(
    "--experiment",
    default="simulated",
    show_default=True,
    help="Names by commas; `simulated`: all in virtual time; `list` prints the names.",
)
@SEEDS
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="JSON lines of simulated rollouts on CPUs: known ones are not run again.",
)
@click.option(
    "--scheduler",
    default=None,
    help="Run the rollouts on CPUs on the workers of this Dask scheduler [default: here].",
)
@click.option(
    "--model",
    default=None,
    help="Directory with a tokenizer, for the live ones [default: the shipped tiny-agent].",
)
@shared_options
def actions(
    experiment: str,
    seeds: int,
    out: Path | None,
    scheduler: str | None,
    model: str | None,
    as_json: bool,
    seed: int,
) -> None:
    """ARL-Tangram's experiments with CPUs, GPUs and APIs, and what an action costs on a real cluster."""
    from heddle_dask.benchmarks.actions.experiments import EXPERIMENTS, chosen
    from heddle_dask.benchmarks.actions.rows import tables

    if experiment == "list":
        for name, one in EXPERIMENTS.items():
            click.echo(f"{name:18}  {one.about}")
        return
    names = chosen(experiment)

    def say(line: str) -> None:
        click.echo(line, err=True)

    from heddle_dask.benchmarks.actions.cpu_play import CpuPlay, run_here
    from heddle_dask.benchmarks.code_digest import DECIDING, code_digest
    from heddle_dask.cli.engine_option import chosen_model

    play = CpuPlay(code_digest(DECIDING), out, _on(scheduler, say) if scheduler else run_here, say)
    live = any(not EXPERIMENTS[name].simulated for name in names)
    rows = _measured(names, play, range(seed, seed + seeds), chosen_model(model, "emulated") if live else "")
    for line in tables(rows):
        click.echo(line, err=as_json)
    if as_json:
        print_measured({"rows": [row.as_json() for row in rows]})


def _measured(names: Sequence[str], play: CpuPlay, seeds: Sequence[int], model: str) -> list[ActionRow]:
    from heddle_dask.benchmarks.actions.experiments import EXPERIMENTS

    rows: list[ActionRow] = []
    for name in names:
        play.say(f"{name} …")
        rows += EXPERIMENTS[name].rows(play, seeds, model)
    return rows


def _on(scheduler: str, say: Callable[[str], None]) -> Any:
    """Runs jobs on a Dask cluster."""
    from heddle_dask.benchmarks.actions.cpu_job import run_cpu_job
    from heddle_dask.cli.sweep_runs import run_on_cluster

    def run(jobs: Sequence[CpuJob], ended: Callable[[int, CpuFigures], None]) -> None:
        run_on_cluster(run_cpu_job, jobs, scheduler, say, ended)

    return run
