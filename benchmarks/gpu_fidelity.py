"""``python -m benchmarks gpu-fidelity``: runs on a GPU beside their simulation from a measured table.

Nothing is fitted to a makespan: the engines are those of the table, and the control plane has its usual delays. A
router has no simulation, and `kv-forecast` is simulated as it was when these runs were made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from benchmarks.fidelity_twins import delays_of
from benchmarks.live_setup import ARM_PREFIX, Workload
from heddle_dask.cli.shared_options import shared_options
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.cost.measured import MeasuredTable
from heddle_dask.cost.table_fit import fit_table
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import Arm, simulate

_THEN = "admission=kv-forecast,doubt=0.5"
# What makes two runs the same but for chance.
_SETUP = ("workload", "tasks", "token_scale", "tool_scale", "seed", "engine_count", "slots", "context")


@dataclass(frozen=True, slots=True)
class BesideRow:
    """An arm live and simulated; `ratio`: simulated over the mean of the live makespans."""

    arm: str
    live_s: tuple[float, ...]
    simulated_s: float
    ratio: float


def live_makespans(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Live makespans by arm, without those of routers."""
    found: dict[str, tuple[float, ...]] = {}
    for row in rows:
        if not row["arm"].startswith(ARM_PREFIX):
            found[row["arm"]] = (*found.get(row["arm"], ()), row["makespan_s"])
    return found


def same_ranking(rows: Sequence[BesideRow]) -> bool:
    """Whether the arms have the same order by live and by simulated makespan."""
    ordered = sorted(rows, key=lambda row: fmean(row.live_s))
    return all(one.simulated_s <= other.simulated_s for one, other in pairwise(ordered))


def arm_then(text: str) -> Arm:
    """The arm with the rule of `kv-forecast` before it changed."""
    arm = Arm.parse(text)
    asked = [override for override in arm.overrides if override.startswith("admission=")]
    if asked == ["admission=kv-forecast"] or (arm.preset == "sticky-forecast" and not asked):
        return replace(arm, overrides=(*(o for o in arm.overrides if o not in asked), _THEN))
    return arm


def simulated_beside(rows: Sequence[Mapping[str, Any]], table: MeasuredTable) -> list[BesideRow]:
    """Simulate every arm of the rows once, on engines of the table.

    Raises
    ------
    BadInput
        The rows are of several workloads, seeds or fleets, or of another number of engines than the table.
    """
    setups = {tuple(row[key] for key in _SETUP) for row in rows}
    if len(setups) != 1:
        raise BadInput(f"--live has rows of {len(setups)} workloads, seeds or fleets: give those of one")
    trace, tasks, token_scale, tool_scale, seed, engines, slots, context = setups.pop()
    if engines != table.engines:
        raise BadInput(
            f"--table is of {table.engines} engines at once, the rows are of {engines}: give a table of these"
        )
    fit = fit_table(table)
    cost = fit.cost.for_contexts(context)
    delays = delays_of(None, tasks)
    delays = replace(delays.with_request(fit.request_s), slot_s=delays.slot_s + fit.request_s)
    described = (
        EngineDescription(EngineId(f"engine-{number}"), slots, context, kv_capacity_tokens=cost.capacity_tokens)
        for number in range(engines)
    )
    fleet = SimulatedFleet(tuple((each, cost) for each in described), delays=delays, believed={1: cost})
    planned, others = Workload(Path(trace), tasks, token_scale, tool_scale, seed).planned(context)
    beside = []
    for name, live_s in live_makespans(rows).items():
        arm = arm_then(name)
        simulated_s = simulate(arm.preset, arm.overrides, fleet, planned, seed=seed, warm=others).makespan_s
        beside.append(BesideRow(name, live_s, round(simulated_s, 2), round(simulated_s / fmean(live_s), 3)))
    return sorted(beside, key=lambda row: fmean(row.live_s))


@click.command("gpu-fidelity")
@click.option("--live", type=click.Path(path_type=Path, exists=True), required=True, help="Rows of live runs.")
@click.option("--table", type=str, required=True, help="Measured table of one of the busy engines.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=None, help="JSON lines, a row an arm.")
@shared_options
def gpu_fidelity(live: Path, table: str, out: Path | None, as_json: bool, seed: int) -> None:
    """Makespans of live runs on GPUs beside simulated ones, arm by arm."""
    rows = simulated_beside([json.loads(line) for line in live.read_text().splitlines()], MeasuredTable.load(table))
    for row in rows:
        lived = ", ".join(f"{seconds:.1f}" for seconds in row.live_s)
        click.echo(f"{row.arm}: live {lived} s, simulated {row.simulated_s:.1f} s ({row.ratio:.2f})", err=as_json)
    order = "the same order" if same_ranking(rows) else "another order"
    click.echo(f"simulated makespans have {order}", err=as_json)
    if out is not None:
        out.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in rows), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows], "same_ranking": same_ranking(rows)}))
