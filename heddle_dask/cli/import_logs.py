"""``heddle import``: logs of other programs as a trace, for replay, prediction and simulation."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import click

from heddle_dask.cli.shared_options import check_writable, print_json, shared_options, write_file
from heddle_dask.core.errors import BadInput


@click.command("import")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--model",
    default=None,
    metavar="DIR",
    help="Its tokenizer counts what the logs do not [default: four characters are a token].",
)
@shared_options
def import_logs(sources: tuple[Path, ...], out: Path, model: str | None, as_json: bool, seed: int) -> None:
    """Write the trajectories in SOURCES to OUT, a trace (.jsonl or .jsonl.gz).

    Sources are ATIF documents, lines of chats in OpenAI's form, or folders of them (docs/workloads.md). The trace has
    numbers and labels, and no text. Use it as replay:OUT, --workload OUT or predictor=xgboost,warm=OUT.
    """
    if not out.name.endswith((".jsonl", ".jsonl.gz")):
        raise BadInput(f"{out}: give a name that ends with .jsonl or .jsonl.gz")
    if out.exists():
        raise BadInput(f"{out} exists: choose another path")
    check_writable("OUT", out)
    from heddle_dask.workloads.imported.log_files import logged_trajectories
    from heddle_dask.workloads.imported.trace_lines import by_characters

    count, counted = by_characters, "chars/4"
    if model is not None:
        from heddle_dask.chat.template import ChatTemplate

        count, counted = ChatTemplate.load(model).count_tokens, "tokenizer"
    lines, ids, steps = [], set(), 0
    for one in logged_trajectories(sources):
        if one.trajectory_id in ids:
            raise BadInput(f"two trajectories have the id {one.trajectory_id!r}: import them into traces of their own")
        ids.add(one.trajectory_id)
        lines.append(one.line(count, counted))
        steps += len(one.steps)
    content = "".join(f"{line}\n" for line in lines).encode()
    write_file("OUT", out, gzip.compress(content, mtime=0) if out.suffix == ".gz" else content)
    tokens = sum(step["gen_tokens"] for line in lines for step in json.loads(line)["steps"])
    if as_json:
        print_json({"out": str(out), "trajectories": len(lines), "steps": steps, "tokens": tokens})
    else:
        click.echo(f"{out}: {len(lines):,} trajectories, {steps:,} steps, {tokens:,} generated tokens")
