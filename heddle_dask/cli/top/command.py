"""``heddle top``: its options."""

from __future__ import annotations

from pathlib import Path

import click

from heddle_dask.cli.shared_options import POSITIVE, shared_options
from heddle_dask.core.errors import BadInput

_FILE = click.Path(path_type=Path)


@click.command("top")
@click.argument("run", type=_FILE, required=False)
@click.option("--scheduler", default=None, help="Address of a Dask scheduler.")
@click.option("--scheduler-file", type=_FILE, default=None, help="JSON file of `dask scheduler --scheduler-file`.")
@click.option("--tls-ca-file", type=_FILE, default=None, help="PEM file, for a scheduler at tls://HOST:PORT.")
@click.option("--tls-cert", type=_FILE, default=None, help="PEM file of this client's certificate.")
@click.option("--tls-key", type=_FILE, default=None, help="PEM file of this client's key.")
@click.option(
    "--interval",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Seconds; less than 1 shows a picture twice.",
)
@click.option("--only", default="", metavar="NAME", help="Of several runs the one with that name or session.")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@shared_options
def top(
    run: Path | None,
    scheduler: str | None,
    scheduler_file: Path | None,
    tls_ca_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    interval: float,
    only: str,
    once: bool,
    as_json: bool,
    seed: int,
) -> None:
    """Watch a rollout in the terminal: engines, trajectories, the tail, actions, failures.

    RUN is the --out of a `heddle rollout` with a cluster of its own on this machine [default: the latest in runs/].
    With --json, one line per picture.
    """
    if sum(each is not None for each in (run, scheduler, scheduler_file)) > 1:
        raise BadInput("RUN, --scheduler and --scheduler-file exclude each other: use one")
    from heddle_dask.cli.top.watch import place_of, watch

    place = place_of(run, scheduler, scheduler_file, tls_ca_file, tls_cert, tls_key, only)
    watch(place, interval_s=interval, once=once, as_json=as_json)
