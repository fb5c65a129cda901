"""``benchmarks redundancy``: how much redundancy favours short trajectories, on recorded attempts or environments."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from benchmarks.code_digest import code_digest
from benchmarks.runner import runner_of
from benchmarks.tables import print_measured
from heddle_dask.cli.engine_option import engine_option
from heddle_dask.cli.shared_options import COUNT, POSITIVE, WholeNumber, shared_options

if TYPE_CHECKING:
    from benchmarks.redundancy.rows import RedundancyRow


@click.command("redundancy")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    help="Recorded trace with rewards (NAME or FILE), or a stored run (RUN.zarr) of a real agent; repeatable "
    "[default: tau_dialogues and intercode, where no --env is given].",
)
@click.option("--env", "envs", multiple=True, help="Environment to roll out on engines of this machine; repeatable.")
@click.option("--members", type=COUNT, default=4, show_default=True, help="Members of a group that count.")
@click.option("--extra-members", type=WholeNumber(0), multiple=True, default=(0, 1, 2, 4), show_default=True)
@click.option("--extra-groups", type=WholeNumber(0), multiple=True, default=(0, 2), show_default=True)
@click.option("--groups", type=COUNT, default=8, show_default=True, help="Groups of a batch.")
@click.option(
    "--late",
    type=click.Choice(["cancel", "keep"]),
    multiple=True,
    default=("cancel",),
    show_default=True,
    help="What becomes of late members; repeatable.",
)
@click.option(
    "--token-s",
    type=POSITIVE,
    default=0.02,
    show_default=True,
    help="Seconds of a generated token of a trace.",
)
@click.option("--tasks", type=COUNT, default=40, show_default=True, help="Tasks of each --env.")
@engine_option("vllm")
@click.option("--engines", type=COUNT, default=1, show_default=True, help="How many.")
@click.option("--slots", type=COUNT, default=None, help="Of each engine [default: for one batch].")
@click.option("--model", default=None, help="Model directory [default: the shipped tiny-agent].")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Directory that keeps the runs of --env, for --workload; DIR.jsonl keeps the rows [default: none].",
)
@click.option(
    "--cancel-live/--replay-only",
    default=True,
    show_default=True,
    help="Roll --env out again with the most redundancy, with cancellation.",
)
@shared_options
def redundancy(
    workloads: tuple[str, ...],
    envs: tuple[str, ...],
    members: int,
    extra_members: tuple[int, ...],
    extra_groups: tuple[int, ...],
    groups: int,
    late: tuple[Literal["cancel", "keep"], ...],
    token_s: float,
    tasks: int,
    engine: str,
    engines: int,
    slots: int | None,
    model: str | None,
    out: Path | None,
    cancel_live: bool,
    as_json: bool,
    seed: int,
) -> None:
    """Lengths and rewards of the trajectories that count, against all, by the amount of redundancy."""
    from benchmarks.redundancy.rows import RedundancyJob, RedundancySweep, measure_redundancy, rows_of

    runner = runner_of(Path(f"{out}.jsonl") if out else None, code_digest())
    sweep = RedundancySweep(members, extra_members, groups, extra_groups, late)
    rows: list[RedundancyRow] = []
    for workload in workloads or (() if envs else ("tau_dialogues", "intercode")):
        rows += rows_of(
            runner,
            RedundancyJob(workload, sweep, seed, f"{token_s:g} s a token"),
            lambda job: measure_redundancy(job.workload, sweep, token_s=token_s, seed=seed),
        )
    if envs:
        from benchmarks.redundancy.live import LiveGroups, measure_environment
        from heddle_dask.cli.engine_option import chosen_model
        from heddle_dask.engines.collector import collect_seldom
        from heddle_dask.engines.defaults import with_small_defaults
        from heddle_dask.engines.spec import EngineSpec

        attempts = (groups + max(extra_groups)) * sweep.attempts
        spec = EngineSpec(engine, chosen_model(model, engine), slots=slots or -(-attempts // engines), seed=seed)
        with nullcontext(out) if out else tempfile.TemporaryDirectory(prefix="heddle-bench-") as directory:
            how = LiveGroups(with_small_defaults(spec), engines, tasks, Path(directory), cancel_live, seed)
            collect_seldom()
            for env in envs:
                rows += rows_of(
                    runner,
                    RedundancyJob(env, sweep, seed, repr(how)),
                    lambda job: asyncio.run(measure_environment(job.workload, how, sweep)),
                )
    if as_json:
        print_measured({"rows": [asdict(row) for row in rows]})
    _print_table(rows, to_stderr=as_json)


def _print_table(rows: list[RedundancyRow], *, to_stderr: bool) -> None:
    line = "{:24} {:>8} {:>7} {:>6} {:>6} {:>6} {:>6} {:>7} {:>7} {:>16} {:>6} {:>6} {:>6} {:>6}"
    head = "measured", "members", "groups", "late", "tokens", "of all", "reward", "of all", "bias", "group"
    names = ("workload", *head, "batch", "late", "wasted")
    click.echo(line.format(*names), err=to_stderr)
    for row in rows:
        low, high = row.reward_ci
        values = (
            row.workload[-24:],
            row.measured,
            f"{row.members}+{row.extra_members}",
            f"{row.groups_per_batch}+{row.extra_groups}",
            row.late_members,
            f"{row.tokens_counted:.0f}",
            f"{row.tokens_all:.0f}",
            f"{row.reward_counted:.3f}",
            f"{row.reward_all:.3f}",
            f"{low:+.3f}..{high:+.3f}",
            f"{row.group_s / row.group_plain_s:.2f}",
            f"{row.batch_s / row.batch_plain_s:.2f}",
            f"{row.late_share:.0%}",
            f"{row.wasted_share:.0%}",
        )
        click.echo(line.format(*values), err=to_stderr)
