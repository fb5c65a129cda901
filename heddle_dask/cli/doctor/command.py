"""``heddle doctor``: its options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heddle_dask.cli.shared_options import print_json, shared_options
from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from heddle_dask.cli.doctor.checks import Check
    from heddle_dask.live.clusters.slurm.worker_group import ClusterPlan


@click.command("doctor")
@click.option("--scheduler", default=None, help="Also check the Dask scheduler at this address.")
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    default=None,
    help="Also check this cluster file: SLURM is asked about each group, nothing is submitted.",
)
@click.option("--model", default=None, help="Directory of the model whose memory is told [default: the tiny-agent].")
@click.option("--job-scripts", is_flag=True, help="Only print the job scripts of the groups of --cluster.")
@shared_options
@click.pass_context
def doctor(
    ctx: click.Context,
    scheduler: str | None,
    cluster: Path | None,
    job_scripts: bool,
    model: str | None,
    as_json: bool,
    seed: int,
) -> None:
    """Check what a rollout needs on this machine; exit code 1 if something needed fails."""
    if job_scripts and cluster is None:
        raise BadInput("--job-scripts needs --cluster FILE")
    plan = None
    if cluster is not None:
        # Imported here: it takes a second.
        from heddle_dask.cli.doctor.cluster_file_checks import plan_to_check

        plan = plan_to_check(cluster)
        if job_scripts:
            _print_scripts(plan, as_json)
            return
    ctx.exit(_print_checks(_all_checks(scheduler, plan, model), as_json))


def _all_checks(scheduler: str | None, plan: ClusterPlan | None, model: str | None) -> Iterable[Check]:
    from heddle_dask.cli.doctor.checks import run_checks

    yield from run_checks(scheduler, model)
    if plan is not None:
        from heddle_dask.cli.doctor.cluster_file_checks import cluster_checks

        yield from cluster_checks(plan)


def _print_checks(all_checks: Iterable[Check], as_json: bool) -> int:
    """Print each result at once; returns the exit code."""
    checks = []
    for check in all_checks:
        checks.append(check)
        click.secho(f"{check.verdict:>4}  ", nl=False, err=as_json, fg=check.colour)
        click.echo(check.line(), err=as_json)
    failed = sum(check.verdict == "fail" for check in checks)
    if as_json:
        warned = sum(check.verdict == "warn" for check in checks)
        rows = [asdict(check) for check in checks]
        print_json({"ok": failed == 0, "failed": failed, "warned": warned, "checks": rows})
    return 1 if failed else 0


def _print_scripts(plan: ClusterPlan, as_json: bool) -> None:
    from heddle_dask.cli.doctor.cluster_file_checks import example_scripts

    scripts = example_scripts(plan)
    if as_json:
        print_json({"job_scripts": scripts})
        return
    click.echo("\n".join(scripts.values()), nl=False)
