"""``python -m benchmarks soak``: trajectories for minutes under random kills; what grows, and what is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import uvloop

from benchmarks.soak_faults.names import NAMES
from benchmarks.tables import print_measured
from heddle_dask.cli.one_line import EXIT_FAILED
from heddle_dask.cli.shared_options import COUNT, NOT_NEGATIVE, POSITIVE, shared_options
from heddle_dask.core.errors import BadInput


@click.command("soak")
@click.option("--minutes", type=POSITIVE, default=30.0, show_default=True, help="How long.")
@click.option("--engines", type=COUNT, default=2, show_default=True, help="Emulated engines.")
@click.option("--trajectories-per-minute", type=COUNT, default=334, show_default=True, help="That start in a minute.")
@click.option(
    "--kill-every-s",
    type=NOT_NEGATIVE,
    default=20.0,
    show_default=True,
    help="Mean seconds between kills of an engine, a rollout or a tool worker; 0: none.",
)
@click.option(
    "--memory",
    type=COUNT,
    default=None,
    help="Instead: so many trajectories in one session, without kills; a look after each 1,000.",
)
@click.option("--model", default=None, help="Directory with a tokenizer [default: the shipped tiny-agent].")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="RUN.zarr to keep [default: a temporary one].",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    type=click.Choice([*NAMES, "all"]),
    help="Instead: one run under each of these faults of the machine; again for more. Needs root.",
)
@shared_options
@click.pass_context
def soak(
    ctx: click.Context,
    minutes: float,
    engines: int,
    trajectories_per_minute: int,
    kill_every_s: float,
    memory: int | None,
    model: str | None,
    out: Path | None,
    faults: tuple[str, ...],
    as_json: bool,
    seed: int,
) -> None:
    """Memory, open files, processes and shared memory over time, while engines and workers are killed at random.

    Exit code 1 if a trajectory was lost or failed, or a process is left. With --fault, rows of the runs are added to
    --out, and 1 means that something stored was lost, a resume did not complete, or something is left.
    """
    if faults:
        ctx.exit(_under_faults(NAMES if "all" in faults else faults, out, as_json))
    from benchmarks.soak import HEADER, MemoryPlan, SoakPlan, table_line
    from benchmarks.soak import soak as run_soak
    from heddle_dask.cli.engine_option import chosen_model
    from heddle_dask.cli.stored_run import check_out
    from heddle_dask.engines.collector import collect_seldom

    if out is not None:
        check_out(out, "create")
    directory = chosen_model(model, "emulated")
    plan = (
        SoakPlan(minutes, engines, trajectories_per_minute, kill_every_s, seed)
        if memory is None
        else MemoryPlan(memory, engines, seed)
    )
    collect_seldom()
    click.echo(HEADER, err=as_json)
    report = uvloop.run(run_soak(plan, directory, out, lambda row: click.echo(table_line(row), err=as_json)))
    result = report.as_json()
    kills = ", ".join(f"{count} {kind}" for kind, count in report.kills.items())
    click.echo(
        f"{report.trajectories} trajectories, {result['completed']} completed, {result['failed']} failed, "
        f"{result['lost']} lost; killed: {kills}",
        err=as_json,
    )
    for kind, mib in report.growth_mib().items():
        click.echo(f"{kind}: {mib:.2f} MiB for each 1,000 trajectories after the first 10,000", err=as_json)
    for row in report.causes.rows():
        click.echo(f"{row.count} {row.title}, first {row.first_trajectory}: {row.first_message}", err=as_json)
    for line in report.left:
        click.echo(f"still running: {line}", err=True)
    if as_json:
        print_measured(result)
    ctx.exit(0 if report.succeeded else EXIT_FAILED)


def _under_faults(names: Sequence[str], out: Path | None, as_json: bool) -> int:
    from benchmarks.row_file import RowFile
    from benchmarks.soak_faults.place import take_own_namespaces
    from benchmarks.soak_faults.play import faults_named, play

    rows = RowFile(out)
    rows.check_writable()
    try:
        take_own_namespaces()
    except OSError as error:
        raise BadInput(
            f"--fault makes file systems and networks of its own: {error.strerror}; run it as root"
        ) from None
    played = []
    for name, fault in faults_named(name for name in names if rows.find({"kind": "fault", "fault": name}) is None):
        row = play(name, fault)
        click.echo(row.line(), err=as_json)
        rows.add(row.as_json())
        played.append(row)
    if as_json:
        print_measured({"rows": [row.as_json() for row in played]})
    return 0 if all(row.succeeded for row in played) else EXIT_FAILED
