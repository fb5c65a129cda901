"""``python -m benchmarks paper``: Heddle's evaluation in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.deadline import EXACT
from benchmarks.row_file import ROWS_OUT, RowFile
from heddle_dask.cli.option_groups import MAX_CONTEXT_TOKENS, SAMPLES, SEEDS
from heddle_dask.cli.shared_options import COUNT, SEED, print_json, shared_options
from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from benchmarks.paper.best_rule import BestRules


# With --best-rule, unless --arms says otherwise.
_BESIDE_RULES = f"sticky-forecast,heddle:predictor=none,heddle,{EXACT}"


@click.command("paper")
@click.option("--cells", default="all", show_default=True, help="MODEL/WORKLOAD, MODEL or WORKLOAD, by commas.")
@click.option(
    "--arms",
    default="all",
    show_default=True,
    help="baselines, ours, ablations, or names, by commas; with --best-rule strategies in the form of heddle simulate.",
)
@SEEDS
@click.option(
    "--trajectories",
    type=COUNT,
    default=None,
    help="Of every run [default: 100 for each engine of the paper's baselines: 6,400, and 3,200 for 32B].",
)
@SAMPLES
@click.option("--cluster", default="hopper64", show_default=True, help="Name or FILE.toml.")
@MAX_CONTEXT_TOKENS
@ROWS_OUT
@click.option("--only-chosen", is_flag=True, help="Forms of heddle on the chosen degrees only, no uniform ones.")
@click.option(
    "--scheduler",
    default=None,
    help="Run on the workers of this Dask scheduler, which need a checkout [default: here].",
)
@click.option(
    "--best-rule",
    is_flag=True,
    help="Search the best router, uniform degree and limit of live trajectories on other seeds, and run it on --seeds "
    "beside the strategies of --arms.",
)
@click.option("--search-seed", type=SEED, default=100, show_default=True, help="First seed of that search.")
@click.option("--search-seeds", type=COUNT, default=2, show_default=True, help="How many, from it on.")
@click.option("--degrees", default="", help="TP degrees of that search, by commas [default: all that fit].")
@click.option("--routers", default="", help="Routers of that search, by commas [default: all that it knows].")
@click.option("--markdown", is_flag=True, help="Print all tables of --out in Markdown, without running anything.")
@shared_options
def paper(
    cells: str,
    arms: str,
    seeds: int,
    trajectories: int | None,
    samples: int,
    cluster: str,
    max_context_tokens: int,
    out: Path | None,
    only_chosen: bool,
    scheduler: str | None,
    best_rule: bool,
    search_seed: int,
    search_seeds: int,
    degrees: str,
    routers: str,
    markdown: bool,
    as_json: bool,
    seed: int,
) -> None:
    """Baselines and forms of heddle on the paper's models and workloads, each at the paper's and its best degree."""
    from benchmarks.code_digest import DECIDING, code_digest
    from benchmarks.paper.best_rule import BestRules
    from benchmarks.paper.results import PaperResults
    from benchmarks.paper.rule_search import routers_named
    from benchmarks.paper.sweep import PaperConditions, PaperSweep, arms_named, cells_named
    from benchmarks.paper.tables import all_tables, as_json_object, main_tables
    from benchmarks.runner import runner_of
    from benchmarks.tables import names
    from heddle_dask.sim.clusters import cluster_of
    from heddle_dask.sim.sweep import parse_arms

    _check_asked(cells, out, markdown=markdown, best_rule=best_rule, on_cluster=scheduler is not None)
    rows = RowFile(out) if markdown else None
    if rows is None:
        conditions = PaperConditions(cluster, cluster_of(cluster), trajectories, samples, max_context_tokens)
        found, reported = cells_named(cells), range(seed, seed + seeds)
        runner = runner_of(out, code_digest(DECIDING), scheduler)
        rows = runner.rows
        if warning := rows.other_code(runner.code):
            click.echo(warning, err=True)
        if best_rule:
            search = BestRules(
                conditions,
                found,
                parse_arms(_BESIDE_RULES if arms == "all" else arms),
                runner,
                search_seeds=range(search_seed, search_seed + search_seeds),
                seeds=reported,
                routers=routers_named(routers),
                degrees=_degrees(names(degrees)),
            )
            _print_rules(search, rows, as_json=as_json)
            return
        PaperSweep(conditions, found, arms_named(arms), reported, runner, only_chosen=only_chosen).play()
    results = PaperResults(rows.rows("run"), rows.rows("degrees"))
    for line in (all_tables if markdown else main_tables)(results):
        click.echo(line, err=as_json)
    if as_json:
        print_json(as_json_object(results))


def _check_asked(cells: str, out: Path | None, *, markdown: bool, best_rule: bool, on_cluster: bool) -> None:
    if best_rule and (markdown or on_cluster):
        raise BadInput("--best-rule runs here and prints its own table: leave out --markdown and --scheduler")
    if "memory-short" in cells and not best_rule:
        raise BadInput("--cells memory-short is no cell of the paper: give --best-rule")
    if markdown and (out is None or not out.exists()):
        raise BadInput("--markdown prints stored runs: give --out FILE of an earlier sweep")


def _degrees(texts: list[str]) -> list[int]:
    if not all(text.isdecimal() and int(text) for text in texts):
        raise BadInput(f"--degrees {','.join(texts)}: give TP degrees, separated by commas")
    return [int(text) for text in texts]


def _print_rules(search: BestRules, rows: RowFile, *, as_json: bool) -> None:
    """Search the best simple rule of each cell, and print it beside the other strategies."""
    from benchmarks.paper.best_rule import as_json_object, best_rule_tables

    found = list(search.results())
    for line in best_rule_tables(found):
        click.echo(line, err=as_json)
    if as_json:
        print_json(as_json_object(found, rows))
