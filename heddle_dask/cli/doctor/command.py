"""``heddle doctor``: its options."""

from __future__ import annotations

import click

from heddle_dask.cli.shared_options import print_json, shared_options


@click.command("doctor")
@click.option("--scheduler", default=None, help="Also check the Dask scheduler at this address.")
@shared_options
@click.pass_context
def doctor(ctx: click.Context, scheduler: str | None, as_json: bool, seed: int) -> None:
    """Check what a rollout needs on this machine; exit code 1 if something needed fails."""
    from heddle_dask.cli.doctor.checks import run_checks

    checks = []
    for check in run_checks(scheduler):
        checks.append(check)
        click.secho(f"{check.verdict:>4}  ", nl=False, err=as_json, fg=check.colour)
        click.echo(check.line(), err=as_json)
    failed = sum(check.verdict == "fail" for check in checks)
    if as_json:
        warned = sum(check.verdict == "warn" for check in checks)
        rows = [check.as_json() for check in checks]
        print_json({"ok": failed == 0, "failed": failed, "warned": warned, "checks": rows})
    ctx.exit(1 if failed else 0)
