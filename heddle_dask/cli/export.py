"""``heddle export``: a run or the batches of a training in the form of another program."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from heddle_dask.cli.shared_options import print_json, shared_options
from heddle_dask.core.errors import BadInput


class _Form(click.Choice[str]):
    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "trl":
            self.fail("TRL reads no files: its trainers ask for trajectories (docs/training-data.md#trl)", param, ctx)
        return super().convert(value, param, ctx)


_FORMS = _Form(("parquet", "npz", "prime-rl", "verl"))


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--as", "form", type=_FORMS, default="parquet", show_default=True, help="The form.")
@click.option(
    "--groups-per-step",
    type=int,
    default=None,
    metavar="N",
    help="Groups of a stored run in an optimiser step; all of them in one without it.",
)
@click.option(
    "--advantages",
    default="mean",
    show_default=True,
    metavar="NAME",
    help="mean, mean-std or package.module:function.",
)
@click.option("--ranks", type=int, default=1, show_default=True, help="Data-parallel ranks of prime-rl.")
@click.option("--pad-token-id", type=int, default=0, show_default=True, help="Fills short sequences for verl.")
@shared_options
def export(
    run: Path,
    out: Path,
    form: str,
    groups_per_step: int | None,
    advantages: str,
    ranks: int,
    pad_token_id: int,
    as_json: bool,
    seed: int,
) -> None:
    """Write RUN, a stored run or the folder of a training, to OUT: a file for Parquet, else a folder."""
    if form == "parquet":
        from heddle_dask.records.exporters import export_parquet
        from heddle_dask.records.reader import RunReader

        counts = {"rows": export_parquet(RunReader(run), out)}
    else:
        from heddle_dask.records.schema import is_ours
        from heddle_dask.training.advantages import advantage_function
        from heddle_dask.training.exports.steps import ExportOptions, export_batches, export_run

        options = ExportOptions(form, advantage_function(advantages), ranks, pad_token_id)
        if is_ours(run):
            in_one = 2**31 - 1
            counts = asdict(export_run(run, out, options, in_one if groups_per_step is None else groups_per_step))
        elif groups_per_step is not None:
            raise BadInput("--groups-per-step is for a stored run: the batches of a training are exported as they are")
        else:
            counts = asdict(export_batches(run, out, options))
    if as_json:
        print_json({"out": str(out), "form": form, **counts})
    else:
        told = [f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items()]
        why = " (rewards are equal or unknown)" if counts.get("groups_left_out") else ""
        click.echo(f"{out}: {', '.join(told)}{why}")
