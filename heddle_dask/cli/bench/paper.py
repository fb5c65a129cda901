"""``heddle bench paper``: Heddle's evaluation in virtual time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heddle_dask.cli.option_groups import MAX_CONTEXT_TOKENS, SAMPLES, SEEDS
from heddle_dask.cli.shared_options import COUNT, SEED, print_json, shared_options
from heddle_dask.core.errors import BadInput

if TYPE_CHECKING:
    from heddle_dask.benchmarks.paper.best_rule import BestRules
    from heddle_dask.benchmarks.paper.parts import PaperPart
    from heddle_dask.benchmarks.paper.store import PaperStore, Row
    from heddle_dask.benchmarks.paper.sweep import PaperRun, PaperSweep


# With --best-rule, unless --arms says otherwise.
_BESIDE_RULES = "sticky-forecast,heddle:predictor=none,heddle,heddle-deadline:predictor=oracle"


@click.command("paper")
@click.option(
    "--cells", default="all", show_default=True, help="MODEL/WORKLOAD, MODEL or WORKLOAD, by commas."
)
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
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="JSON lines; a run is added when it ends, and skipped if the file has it.",
)
@click.option(
    "--only-chosen", is_flag=True, help="Forms of heddle on the chosen degrees only, no uniform ones."
)
@click.option(
    "--scheduler",
    default=None,
    help="Run on the workers of this Dask scheduler, an arm of a cell each [default: here].",
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
@click.option(
    "--markdown", is_flag=True, help="Print all tables of --out in Markdown, without running anything."
)
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
    from heddle_dask.benchmarks.code_digest import DECIDING, code_digest
    from heddle_dask.benchmarks.paper.best_rule import BestRules
    from heddle_dask.benchmarks.paper.parts import parts_of
    from heddle_dask.benchmarks.paper.results import PaperResults
    from heddle_dask.benchmarks.paper.rule_search import routers_named
    from heddle_dask.benchmarks.paper.store import PaperStore
    from heddle_dask.benchmarks.paper.sweep import PaperConditions, PaperSweep, arms_named, cells_named
    from heddle_dask.benchmarks.paper.tables import all_tables, as_json_object, main_tables
    from heddle_dask.sim.clusters import cluster_of
    from heddle_dask.sim.sweep import parse_arms

    _check_asked(cells, out, markdown=markdown, best_rule=best_rule, on_cluster=scheduler is not None)
    store = PaperStore(out)
    if not markdown:
        conditions = PaperConditions(cluster, cluster_of(cluster), trajectories, samples, max_context_tokens)
        code = code_digest(DECIDING)
        found, reported = cells_named(cells), range(seed, seed + seeds)
        asked = (conditions, found, () if best_rule else arms_named(arms), reported, store)
        store.check_writable()
        if warning := store.other_code(code):
            click.echo(warning, err=True)
        if best_rule:
            search = BestRules(
                conditions,
                found,
                parse_arms(_BESIDE_RULES if arms == "all" else arms),
                store,
                search_seeds=range(search_seed, search_seed + search_seeds),
                seeds=reported,
                code=code,
                routers=routers_named(routers),
                degrees=_degrees(degrees),
                on_run=_say,
            )
            _print_rules(search, store, as_json=as_json)
            return
        if scheduler is None:
            _play(PaperSweep(*asked, code=code, only_chosen=only_chosen))
        else:
            _play_there(parts_of(*asked, code=code, only_chosen=only_chosen), store, scheduler)
    results = PaperResults(store.rows("run"), store.rows("degrees"))
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


def _degrees(text: str) -> list[int]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(name.isdecimal() and int(name) for name in names):
        raise BadInput(f"--degrees {text}: give TP degrees, separated by commas")
    return [int(name) for name in names]


def _say(run: PaperRun) -> None:
    row = run.row
    click.echo(
        f"{row['model']}/{row['workload']}, {row['arm']} on {row['engines']}, seed {row['seed']}: "
        f"{row['makespan_s']:,.1f} s ({run.cpu_s:.1f} s of CPU)",
        err=True,
    )


def _print_rules(search: BestRules, store: PaperStore, *, as_json: bool) -> None:
    """Search the best simple rule of each cell, and print it beside the other strategies."""
    from heddle_dask.benchmarks.paper.best_rule import as_json_object, best_rule_tables

    found = list(search.results())
    for line in best_rule_tables(found):
        click.echo(line, err=as_json)
    if as_json:
        print_json(as_json_object(found, store))


def _play(sweep: PaperSweep) -> None:
    """Run the sweep; prints a line per run, with an upper bound of the time left."""
    total = sweep.most_runs()
    began_s, fresh = time.monotonic(), 0
    for number, run in enumerate(sweep.runs(), start=1):
        if run.cpu_s is None:
            continue
        fresh += 1
        row = run.row
        left_s = (time.monotonic() - began_s) / fresh * (total - number)
        click.echo(
            f"{number}/{total}: {row['model']}/{row['workload']}, {row['arm']} on {row['engines']}, "
            f"seed {row['seed']}: {row['makespan_s']:,.1f} s, {row['bound_share']:.1%} of the bound "
            f"({run.cpu_s:.1f} s of CPU); at most {left_s / 60:,.0f} min left",
            err=True,
        )


def _play_there(parts: Sequence[PaperPart], store: PaperStore, scheduler: str) -> None:
    """Run the parts on a Dask cluster; stores the rows of each part as it ends and prints a line."""
    from heddle_dask.benchmarks.paper.parts import run_part
    from heddle_dask.cli.rollout.progress import duration
    from heddle_dask.cli.sweep_runs import run_on_cluster

    began_s, done = time.monotonic(), 0

    def ended(number: int, rows: list[Row]) -> None:
        nonlocal done
        done += 1
        for row in rows:
            if store.find(row) is None:  # two arms of one predictor choose the same degrees
                store.add(row)
        runs = sum(row["kind"] == "run" for row in rows)
        left = len(parts) - done
        rest = f"; about {duration((time.monotonic() - began_s) / done * left)} left" if left else ""
        say(f"{done}/{len(parts)}: {parts[number].name}: {runs} runs{rest}")

    def say(line: str) -> None:
        click.echo(line, err=True)

    run_on_cluster(run_part, parts, scheduler, say, ended)
