"""``python -m benchmarks gpu-fidelity``: runs on a GPU beside their simulation from a measured table.

Nothing is fitted to a makespan: the engines are those of the table, and the control plane has its usual delays. A
router has no simulation, and `kv-forecast` is simulated about as it was when these runs were made.
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

_THEN = "admission=kv-forecast,fill=0.95,prior=1.0,doubt=0.5"
# What makes two runs the same but for chance.
_SETUP = ("workload", "tasks", "token_scale", "tool_scale", "seed", "engine_count", "slots", "context")


@dataclass(frozen=True, slots=True)
class BesideRow:
    """An arm live and simulated; `ratio`: simulated over the mean of the live makespans."""

    arm: str
    live_s: tuple[float, ...]
    simulated_s: float
    ratio: float


@dataclass(frozen=True, slots=True)
class SeedRow:
    """An arm simulated with one draw of the trajectories."""

    arm: str
    seed: int
    simulated_s: float


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


@dataclass(frozen=True, slots=True)
class GpuReplay:
    """Setup of live runs, to be simulated on engines of a measured table.

    Attributes
    ----------
    workload
        Trajectories, and the seed that draws them.
    context
        Longest context of an engine.
    """

    workload: Workload
    context: int
    fleet: SimulatedFleet

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], table: MeasuredTable) -> GpuReplay:
        """The setup of these rows.

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
        return cls(Workload(Path(trace), tasks, token_scale, tool_scale, seed), context, fleet)

    def makespans(self, arms: Iterable[Arm]) -> list[float]:
        """Simulated makespan of each arm."""
        planned, others = self.workload.planned(self.context)
        seed = self.workload.seed
        runs = (simulate(arm.preset, arm.overrides, self.fleet, planned, seed=seed, warm=others) for arm in arms)
        return [round(run.makespan_s, 2) for run in runs]


def simulated_beside(rows: Sequence[Mapping[str, Any]], table: MeasuredTable) -> list[BesideRow]:
    """Simulate every arm of the rows once, on engines of the table."""
    replayed, lived = GpuReplay.of(rows, table), live_makespans(rows)
    simulated = replayed.makespans(arm_then(name) for name in lived)
    beside = [
        BesideRow(name, live_s, simulated_s, round(simulated_s / fmean(live_s), 3))
        for (name, live_s), simulated_s in zip(lived.items(), simulated, strict=True)
    ]
    return sorted(beside, key=lambda row: fmean(row.live_s))


def simulated_seeds(
    rows: Sequence[Mapping[str, Any]], table: MeasuredTable, arms: Sequence[str], seeds: Iterable[int]
) -> list[SeedRow]:
    """Simulate other arms, as they are now, with other draws of the same workload."""
    replayed = GpuReplay.of(rows, table)
    found = []
    for seed in seeds:
        drawn = replace(replayed, workload=replace(replayed.workload, seed=seed))
        makespans = drawn.makespans(map(Arm.parse, arms))
        found += [SeedRow(arm, seed, simulated_s) for arm, simulated_s in zip(arms, makespans, strict=True)]
    return found


def _keep(rows: Sequence[BesideRow | SeedRow], out: Path | None) -> None:
    if out is not None:
        out.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in rows), encoding="utf-8")


@click.command("gpu-fidelity")
@click.option("--live", type=click.Path(path_type=Path, exists=True), required=True, help="Rows of live runs.")
@click.option("--table", type=str, required=True, help="Measured table of one of the busy engines.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=None, help="JSON lines, a row an arm.")
@click.option("--arm", "arms", multiple=True, help="Simulate these arms in place of the live ones, as they are now.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="With --arm: from --seed on.")
@shared_options
def gpu_fidelity(
    live: Path, table: str, out: Path | None, arms: tuple[str, ...], seeds: int, as_json: bool, seed: int
) -> None:
    """Makespans of live runs on GPUs beside simulated ones, arm by arm; or of other arms and seeds, simulated."""
    lived = [json.loads(line) for line in live.read_text().splitlines()]
    if arms:
        drawn = simulated_seeds(lived, MeasuredTable.load(table), arms, range(seed, seed + seeds))
        for each in drawn:
            click.echo(f"{each.arm}, seed {each.seed}: simulated {each.simulated_s:.1f} s", err=as_json)
        _keep(drawn, out)
        if as_json:
            click.echo(json.dumps({"rows": [asdict(each) for each in drawn]}))
        return
    rows = simulated_beside(lived, MeasuredTable.load(table))
    for row in rows:
        times = ", ".join(f"{seconds:.1f}" for seconds in row.live_s)
        click.echo(f"{row.arm}: live {times} s, simulated {row.simulated_s:.1f} s ({row.ratio:.2f})", err=as_json)
    order = "the same order" if same_ranking(rows) else "another order"
    click.echo(f"simulated makespans have {order}", err=as_json)
    _keep(rows, out)
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows], "same_ranking": same_ranking(rows)}))
