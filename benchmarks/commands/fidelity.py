"""``python -m benchmarks fidelity``: the same workload live and simulated, and how far the two differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import uvloop

from benchmarks.commands.measured_live import measured_live
from benchmarks.row_file import ROWS_OUT
from benchmarks.tables import print_measured
from heddle_dask.cli.shared_options import COUNT, shared_options
from heddle_dask.engines.collector import collect_seldom

if TYPE_CHECKING:
    from benchmarks.fidelity import ArmFidelity, Fidelity, LiveRun

DEFAULT_ARMS = ("heddle", "verl", "slime", "verl-hybrid")


@click.command("fidelity")
@measured_live(token_scale=0.25, engine="emulated")
@click.option(
    "--table",
    multiple=True,
    default=("tiny-agent-cpu",),
    show_default=True,
    help="Measured table of vLLM engines, name or file; several: of other numbers of engines at once.",
)
@click.option(
    "--overhead",
    type=Path,
    default=None,
    help="JSON of `python -m benchmarks overhead` [default: the delays of simulated clusters].",
)
@click.option(
    "--arm",
    multiple=True,
    help="preset:part=name,option=value:… [default: heddle, verl, slime, verl-hybrid].",
)
@click.option("--repeats", type=COUNT, default=5, show_default=True, help="Live runs of each arm.")
@click.option(
    "--live",
    type=Path,
    default=None,
    help="JSON of an earlier comparison: simulate its live runs again, with the same workload options.",
)
@ROWS_OUT
@shared_options
def fidelity(
    trace: tuple[Path, ...],
    tasks: int,
    token_scale: float,
    tool_scale: float,
    engine: str,
    engines: int,
    slots: int,
    profile: str,
    time_scale: float,
    table: tuple[str, ...],
    max_context: int,
    overhead: Path | None,
    arm: tuple[str, ...],
    repeats: int,
    live: Path | None,
    out: Path | None,
    model: str | None,
    as_json: bool,
    seed: int,
) -> None:
    """Makespans live and simulated, arm by arm, and whether both rank the arms equally."""
    from benchmarks.fidelity import as_json as fidelity_json
    from benchmarks.fidelity import check_arm, compare, read_runs, run_live, run_of
    from benchmarks.fidelity_spent import WatchedWorkload
    from benchmarks.fidelity_twins import delays_of, twins_of
    from benchmarks.live_rows import LiveRows, conditions_text
    from heddle_dask.cli.engine_option import chosen_model
    from heddle_dask.sim.rollout import Arm

    arms = [Arm.parse(text) for text in arm or DEFAULT_ARMS]
    for one in arms:
        check_arm(one)
    workloads = [WatchedWorkload(path, tasks, token_scale, tool_scale, seed) for path in trace]
    twins = twins_of(
        engine,
        str(chosen_model(model, engine)),
        engines,
        slots,
        profile=profile,
        tables=table,
        time_scale=time_scale,
        max_context_tokens=max_context,
        delays=delays_of(overhead, tasks),
    )
    if live is None:
        conditions = conditions_text(twins.live, workloads[0], warm=True)
        common = {"kind": "fidelity", "seed": seed, "conditions": conditions}
        file = LiveRows(out, common, run_of, _told)
        collect_seldom()
        uvloop.run(run_live(workloads, twins.live, arms, repeats=repeats, on_run=file.add, has=file.has))
        runs = file.rows
    else:
        runs = read_runs(live)
    found = compare(runs, workloads, twins)
    _show(found, err=as_json)
    if as_json:
        print_measured(fidelity_json(found))


def _told(run: LiveRun) -> str:
    return f"{run.workload} {run.arm} {run.repeat}: live {run.makespan_s:.2f} s"


def _show(found: Fidelity, *, err: bool) -> None:
    click.echo(
        "workload  arm                       live s median (least-most)           simulated s   error",
        err=err,
    )
    for arm in found.arms:
        live = f"{arm.live_median_s:.2f} ({arm.live_least_s:.2f}-{arm.live_most_s:.2f})"
        simulated = f"{arm.simulated_median_s:.2f} ({arm.simulated_least_s:.2f}-{arm.simulated_most_s:.2f})"
        click.echo(f"{arm.workload}  {arm.arm:24s}  {live:>26}  {simulated:>20}  {arm.error:+6.1%}", err=err)
    for ranked in found.rankings:
        verdict = "agrees" if ranked.agrees else "differs"
        click.echo(
            f"{ranked.workload}  ranking {verdict}: {ranked.agreeing} of {ranked.decided} decided pairs; "
            f"live {', '.join(ranked.live)}; simulated {', '.join(ranked.simulated)}",
            err=err,
        )
    click.echo(
        "where the seconds went, means of a trajectory       admitted    life  engine   tools  between   queue  "
        "step ms  held ms  prefilled   cached  preempted  moves",
        err=err,
    )
    for arm in found.arms:
        _show_spent(arm, err=err)
    for arm in found.arms:
        if arm.live.engines_cpu_s:
            click.echo(
                f"{arm.workload}  {arm.arm}: CPU seconds of a live run {arm.live.engines_cpu_s:.1f} of engines, "
                f"{arm.live.control_cpu_s:.1f} of scheduler, workers and driver, in {arm.live_median_s:.1f} s",
                err=err,
            )


def _show_spent(arm: ArmFidelity, *, err: bool) -> None:
    for side, spent in (("live", arm.live), ("simulated", arm.simulated)):
        click.echo(
            f"{arm.workload}  {arm.arm:20s} {side:9s} {spent.admitted_s:8.2f}  {spent.life_s:6.2f}  "
            f"{spent.engine_s:6.2f}  {spent.tools_s:6.2f}  {spent.between_s:7.2f}  {spent.queue_s:6.2f}  "
            f"{1000 * spent.step_s:7.1f}  {1000 * spent.held_s:7.1f}  {spent.prefilled_tokens:9.0f}  "
            f"{spent.cached_tokens:7.0f}  {spent.preemptions:9.1f}  {spent.moves:5.1f}",
            err=err,
        )
