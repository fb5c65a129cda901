"""``heddle simulate``: presets side by side in virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heddle_dask.cli.engine_option import strategies_from_here
from heddle_dask.cli.option_groups import simulated
from heddle_dask.cli.shared_options import COUNT, check_writable, print_json, shared_options, write_file

if TYPE_CHECKING:
    from heddle_dask.sim.rollout import SimulatedRollout

DEFAULT_STRATEGIES = "heddle,verl,verl-hybrid,slime,sticky-least-loaded"


@click.command("simulate")
@simulated
@click.option("--cluster", default="hopper64", show_default=True, help="Name or FILE.toml.")
@click.option(
    "--strategy",
    default=DEFAULT_STRATEGIES,
    show_default=True,
    callback=strategies_from_here,
    help="Presets, separated by commas; each preset:part=name,option=value:… .",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    callback=strategies_from_here,
    help="PART=NAME[,KEY=VALUE]...: replace a part of all.",
)
@click.option("--trajectories", type=COUNT, default=None, help="[default: 100 for each GPU, in whole groups]")
@click.option("--tp", type=COUNT, default=None, help="TP degree of all engines [default: the cluster's].")
@click.option("--html", type=click.Path(path_type=Path), default=None, help="Report on the first seed.")
@shared_options
def simulate(
    workload: str,
    cluster: str,
    model: str,
    strategy: str,
    overrides: tuple[str, ...],
    seeds: int,
    trajectories: int | None,
    samples: int,
    tp: int | None,
    slots: int | None,
    max_context_tokens: int,
    token_scale: float,
    tool_scale: float,
    warm: bool,
    html: Path | None,
    scheduler: str | None,
    tables: tuple[str, ...],
    as_json: bool,
    seed: int,
) -> None:
    """Simulate rollouts on a GPU cluster, which need not exist, and compare strategies."""
    from heddle_dask.cli.sweep_runs import play_jobs
    from heddle_dask.sim.clusters import cluster_of, with_choices
    from heddle_dask.sim.plan import engines_in_words
    from heddle_dask.sim.report_html import html_report
    from heddle_dask.sim.sweep import SimulatedWorkload, parse_arms, sweep_jobs

    arms = parse_arms(strategy, overrides)
    described = with_choices(cluster_of(cluster), tp=tp, slots=slots, tables=tables)
    fleet = described.fleet(model, max_context_tokens=max_context_tokens)
    count = trajectories or max(samples, 100 * described.gpus // samples * samples)
    work = SimulatedWorkload(workload, count, samples, max_context_tokens, token_scale, tool_scale)
    watched_seed = seed if html is not None else None
    jobs = sweep_jobs(work, fleet, arms, range(seed, seed + seeds), warm=warm, watched_seed=watched_seed)
    if html is not None:
        check_writable("--html", html)
    rollouts = play_jobs(jobs, scheduler=scheduler, say=lambda line: click.echo(line, err=True))
    conditions = {
        "workload": workload,
        "cluster": cluster,
        "model": model,
        "engines": engines_in_words(described.tp_degrees),
        "slots": fleet.engines[0][0].slots,
        "trajectories": count,
        "samples": samples,
        "max_context_tokens": max_context_tokens,
        "predictor": work.warmth(seed) if warm else "cold",
        **work.scales(),
        **described.conditions(),
    }
    for line in _table(conditions, rollouts):
        click.echo(line, err=as_json)
    if html is not None:
        first = [one for one in rollouts if one.seed == seed]
        page = html_report(first, work.drawn(seed), {**conditions, "seed": seed})
        write_file("--html", html, page)
    if as_json:
        print_json({"conditions": conditions, "rows": [one.figures() for one in rollouts]})


def _rank(mine: Sequence[SimulatedRollout]) -> tuple[int, float]:
    return -sum(one.completed for one in mine), statistics.median(one.makespan_s for one in mine)


def _table(conditions: dict[str, object], rollouts: Sequence[SimulatedRollout]) -> list[str]:
    """A line per strategy, ordered by completed trajectories, then by makespan; medians over seeds."""
    names = list(dict.fromkeys(one.strategy for one in rollouts))
    by_name = {name: [one for one in rollouts if one.strategy == name] for name in names}
    wide = max(len("strategy"), *(len(name) for name in names))
    lines = [
        ", ".join(f"{name} {value}" for name, value in conditions.items()),
        f"{'strategy':{wide}}  makespan s median (least-most)  tokens/s  of bound  median end s  queued s mean/p99  "
        "preempted/KV  prefilled/sampled  moves",
    ]
    ordered = sorted(names, key=lambda name: _rank(by_name[name]))
    for name in ordered:
        mine = by_name[name]
        spans = [one.makespan_s for one in mine]
        spread = f"{statistics.median(spans):,.1f} ({min(spans):,.1f}-{max(spans):,.1f})"
        queued = f"{_middle(mine, 'queue_mean_s'):,.1f}/{_middle(mine, 'queue_p99_s'):,.1f}"
        stopped = f"{_middle(mine, 'preemptions'):,.0f}/{_middle(mine, 'kv_preemptions'):,.0f}"
        prefilled = statistics.median(one.prefilled_tokens / max(1, one.tokens) for one in mine)
        moves = statistics.median(sum(kind["started"] for kind in one.moves.values()) for one in mine)
        ends = statistics.median(one.median_finish_s for one in mine)
        lines.append(
            f"{name:{wide}}  {spread:>30}  {_middle(mine, 'tokens_per_s'):8,.0f}  "
            f"{_middle(mine, 'bound_share'):8.1%}  {ends:12,.1f}  {queued:>17}  {stopped:>12}  {prefilled:17.2f}  "
            f"{moves:5,.0f}"
        )
    lines += [one.shortfall for one in rollouts if one.shortfall]
    return lines


def _middle(rollouts: Sequence[SimulatedRollout], figure: str) -> float:
    return float(statistics.median(getattr(one, figure) for one in rollouts))
