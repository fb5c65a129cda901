"""``heddle bench``: the measurements behind the numbers in README and docs."""

from __future__ import annotations

import click

from heddle_dask.cli.bench.actions import actions
from heddle_dask.cli.bench.dashboard import dashboard
from heddle_dask.cli.bench.decisions import decisions
from heddle_dask.cli.bench.fidelity import fidelity
from heddle_dask.cli.bench.live import live
from heddle_dask.cli.bench.overhead import overhead
from heddle_dask.cli.bench.paper import paper
from heddle_dask.cli.bench.passes import passes
from heddle_dask.cli.bench.predictor import predictor
from heddle_dask.cli.bench.records import records
from heddle_dask.cli.bench.redundancy import redundancy
from heddle_dask.cli.bench.report import report
from heddle_dask.cli.bench.rollart import rollart
from heddle_dask.cli.bench.samples import samples
from heddle_dask.cli.bench.scale import scale
from heddle_dask.cli.bench.slurm import slurm
from heddle_dask.cli.bench.soak import soak
from heddle_dask.cli.bench.watched import watched
from heddle_dask.cli.bench.weights import weights
from heddle_dask.cli.one_line import OneLineGroup


@click.group("bench", cls=OneLineGroup)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure this installation on this machine."""
    import dask.config

    from heddle_dask.benchmarks.code_digest import code_digest

    # A measurement does not depend on the settings of the user.
    ctx.with_resource(dask.config.set({"heddle": None}))
    # Compute the digest now: the files may change while the measurement runs.
    code_digest()


bench.add_command(actions)
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
