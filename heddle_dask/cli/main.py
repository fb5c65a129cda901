"""Entry points: ``heddle`` and ``dask heddle``.

The modules imported here only define options. Dask and zarr take seconds to import, so command functions
import them when they run: Dask loads this module at every start of a ``dask`` command, workers included, and
``heddle --help`` must be quick.
"""

from __future__ import annotations

from typing import NoReturn

import click

from heddle_dask.cli.doctor.command import doctor
from heddle_dask.cli.eval.command import evaluate
from heddle_dask.cli.export import export
from heddle_dask.cli.import_logs import import_logs
from heddle_dask.cli.one_line import OneLineGroup
from heddle_dask.cli.plan.command import plan
from heddle_dask.cli.profile import profile
from heddle_dask.cli.replay import replay
from heddle_dask.cli.rollout.command import rollout
from heddle_dask.cli.show.command import show
from heddle_dask.cli.simulate import simulate
from heddle_dask.cli.top.command import top
from heddle_dask.cli.train.command import train
from heddle_dask.core.errors import BadInput


@click.group("heddle", cls=OneLineGroup, invoke_without_command=True)
@click.version_option(package_name="heddle-dask", prog_name="heddle")
@click.pass_context
def heddle(ctx: click.Context) -> None:
    """Agentic-RL rollouts on Dask clusters with vLLM."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@click.command(
    "bench",
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def bench(words: tuple[str, ...]) -> NoReturn:
    """Say where the measurements are."""
    name = words[0] if words and not words[0].startswith("-") else "NAME"
    raise BadInput(f"measurements are in a checkout, not in the package: `python -m benchmarks {name} …` there")


heddle.add_command(rollout)
heddle.add_command(train)
heddle.add_command(evaluate)
heddle.add_command(show)
heddle.add_command(export)
heddle.add_command(import_logs)
heddle.add_command(top)
heddle.add_command(replay)
heddle.add_command(doctor)
heddle.add_command(simulate)
heddle.add_command(plan)
heddle.add_command(profile)
heddle.add_command(bench)


def main() -> None:
    heddle(prog_name="heddle")
