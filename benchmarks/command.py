"""``python -m benchmarks``: the measurements behind the numbers in README and docs."""

from __future__ import annotations

import click

from benchmarks.behaviour import behaviour
from benchmarks.commands.actions import actions
from benchmarks.commands.dashboard import dashboard
from benchmarks.commands.decisions import decisions
from benchmarks.commands.fidelity import fidelity
from benchmarks.commands.live import live
from benchmarks.commands.overhead import overhead
from benchmarks.commands.paper import paper
from benchmarks.commands.passes import passes
from benchmarks.commands.predictor import predictor
from benchmarks.commands.records import records
from benchmarks.commands.redundancy import redundancy
from benchmarks.commands.report import report
from benchmarks.commands.rollart import rollart
from benchmarks.commands.samples import samples
from benchmarks.commands.scale import scale
from benchmarks.commands.slurm import slurm
from benchmarks.commands.soak import soak
from benchmarks.commands.watched import watched
from benchmarks.commands.weights import weights
from heddle_dask.cli.one_line import OneLineGroup


@click.group("bench", cls=OneLineGroup)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure this installation on this machine."""
    import dask.config

    from heddle_dask.cli.code_digest import code_digest

    # A measurement does not depend on the settings of the user.
    ctx.with_resource(dask.config.set({"heddle": None}))
    # Compute the digest now: the files may change while the measurement runs.
    code_digest()


bench.add_command(actions)
bench.add_command(behaviour)
bench.add_command(dashboard)
bench.add_command(decisions)
bench.add_command(fidelity)
bench.add_command(live)
bench.add_command(overhead)
bench.add_command(paper)
bench.add_command(passes)
bench.add_command(predictor)
bench.add_command(records)
bench.add_command(redundancy)
bench.add_command(report)
bench.add_command(rollart)
bench.add_command(samples)
bench.add_command(scale)
bench.add_command(slurm)
bench.add_command(soak)
bench.add_command(watched)
bench.add_command(weights)
