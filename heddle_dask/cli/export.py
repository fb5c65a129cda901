"""``heddle export``: a run or the batches of a training in the form of another program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from heddle_dask.cli.shared_options import FiniteNumber, print_json, shared_options
from heddle_dask.core.errors import BadInput


class _Form(click.Choice[str]):
    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "trl":
            self.fail("TRL reads no files: its trainers ask for trajectories (docs/training-data.md#trl)", param, ctx)
        return super().convert(value, param, ctx)


_OF_TRAJECTORIES = ("atif", "openenv", "verifiers", "openai")
_FORMS = _Form(("parquet", "npz", "prime-rl", "verl", *_OF_TRAJECTORIES))


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--to", "--as", "form", type=_FORMS, default="parquet", show_default=True, help="The form.")
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
@click.option("--model", default=None, metavar="DIR", help="With the tokenizer, for texts [default: the run's model].")
@click.option(
    "--least-reward",
    type=FiniteNumber(),
    default=None,
    help="Only attempts with it or more; for atif, openenv, verifiers and openai [default: all].",
)
@shared_options
def export(
    run: Path,
    out: Path,
    form: str,
    groups_per_step: int | None,
    advantages: str,
    ranks: int,
    pad_token_id: int,
    model: str | None,
    least_reward: float | None,
    as_json: bool,
    seed: int,
) -> None:
    """Write RUN, a stored run or the folder of a training, to OUT: a file or a folder, as the form has it.

    Parquet, openenv, verifiers and openai (fine-tuning) are files, the others folders (docs/training-data.md).
    """
    if least_reward is not None and form not in _OF_TRAJECTORIES:
        raise BadInput(f"--least-reward is not for {form}: use it with {', '.join(_OF_TRAJECTORIES)}")
    if form in _OF_TRAJECTORIES:
        from heddle_dask.records.reader import RunReader
        from heddle_dask.training.exports.trajectories import WITHOUT_TEXT, export_trajectories

        reader = RunReader(run)
        decode = None if form in WITHOUT_TEXT else _decoder(reader.metadata, model)
        counts = asdict(export_trajectories(reader, out, form, decode, least_reward))
    elif form == "parquet":
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


def _decoder(metadata: Mapping[str, Any], model: str | None) -> Callable[[Sequence[int]], str]:
    """Makes text of tokens, by the tokenizer of the run's model or of the one given."""
    from heddle_dask.chat.template import ChatTemplate

    path = str(metadata.get("model", "")) if model is None else model
    if not path or not Path(path).is_dir():
        raise BadInput(f"the model of the run, {path or 'unknown'}, is not here: give --model DIR with its tokenizer")
    return ChatTemplate.load(path).decode
