"""``heddle bench redundancy``: how much redundancy favours short trajectories, on recorded attempts."""

from __future__ import annotations

from dataclasses import asdict

import click

from heddle_dask.cli.number_types import COUNT, POSITIVE, WholeNumber
from heddle_dask.cli.shared_options import print_measured, shared_options


@click.command("redundancy")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    default=("tau_dialogues", "intercode"),
    show_default=True,
    help="Recorded trace with rewards (NAME or FILE), or a stored run (RUN.zarr) of a real agent; repeatable.",
)
@click.option("--members", type=COUNT, default=4, show_default=True, help="Members of a group that count.")
@click.option("--extra-members", type=WholeNumber(0), multiple=True, default=(0, 1, 2, 4), show_default=True)
@click.option("--extra-groups", type=WholeNumber(0), multiple=True, default=(0, 2), show_default=True)
@click.option("--groups", type=COUNT, default=8, show_default=True, help="Groups of a batch.")
@click.option("--late", type=click.Choice(["cancel", "keep"]), default="cancel", show_default=True)
@click.option(
    "--token-s", type=POSITIVE, default=0.02, show_default=True, help="Seconds of a generated token."
)
@shared_options
def redundancy(
    workloads: tuple[str, ...],
    members: int,
    extra_members: tuple[int, ...],
    extra_groups: tuple[int, ...],
    groups: int,
    late: str,
    token_s: float,
    as_json: bool,
    seed: int,
) -> None:
    """Lengths and rewards of the trajectories that count, against all, by the amount of redundancy."""
    from heddle_dask.benchmarks.redundancy import measure_redundancy

    rows = []
    for workload in workloads:
        measured = measure_redundancy(
            workload,
            members=members,
            extra_members=extra_members,
            extra_groups=extra_groups,
            groups_per_batch=groups,
            late_members="keep" if late == "keep" else "cancel",
            token_s=token_s,
            seed=seed,
        )
        rows += measured
    if as_json:
        print_measured({"rows": [asdict(row) for row in rows]})
        return
    head = "workload", "members", "groups", "tokens", "of all", "reward", "of all", "bias", "time", "wasted"
    click.echo("{:28} {:>7} {:>7} {:>8} {:>8} {:>7} {:>7} {:>16} {:>6} {:>7}".format(*head))
    for row in rows:
        low, high = row.reward_bias_ci
        click.echo(
            f"{row.workload[-28:]:28} {f'{row.members}+{row.extra_members}':>7} {f'{groups}+{row.extra_groups}':>7} "
            f"{row.tokens_counted:8.0f} {row.tokens_all:8.0f} {row.reward_counted:7.3f} {row.reward_all:7.3f} "
            f"{f'{low:+.3f}..{high:+.3f}':>16} {row.seconds_share:6.2f} {row.wasted_share:7.1%}"
        )
