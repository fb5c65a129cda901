"""Compares live and simulated rollouts of the same workload: makespans, and where the seconds differ.

The live side is `benchmarks.live`: a Dask cluster, engine processes, replayed trajectories. The simulated side runs
the same plans in the same order with the same preset, seed and warm predictor, on the same number of engines with the
same slots and context. Their cost is the emulated engines' profile and time scale, or, for vLLM, a measured table
(`heddle profile`). Control-plane delays are from ``python -m benchmarks overhead``. Nothing is fitted to the compared
makespans.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.fidelity_spent import (
    Life,
    Spent,
    WatchedWorkload,
    first_admission_s,
    mean_spent,
    spent_live,
    spent_simulated,
)
from benchmarks.fidelity_twins import Twins
from benchmarks.live import measure_live
from benchmarks.live_setup import ARM_PREFIX, Fleet, LiveRow
from benchmarks.process_usage import cpu_seconds
from benchmarks.row_file import Row
from heddle_dask.core.errors import BadInput
from heddle_dask.core.ids import EngineId
from heddle_dask.engines.spec import engine_kind
from heddle_dask.sim.fleet import ControlDelays, SimulatedFleet
from heddle_dask.sim.rollout import Arm, simulate
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.planned import PlannedTrajectory

EMULATED_AIM, REAL_AIM = 0.03, 0.10
"""Allowed relative error of the simulated makespan, for engine kinds that take a cost and kinds that run a model."""


def aim_of(engine: str) -> float:
    """The allowed relative error for that engine kind."""
    return EMULATED_AIM if engine_kind(engine).takes_cost else REAL_AIM


@dataclass(frozen=True, slots=True)
class FidelityRow:
    """One live run and its simulated twin; `error`: relative difference of the twin's makespan."""

    workload: str
    engine: str
    arm: str
    repeat: int
    live_makespan_s: float
    simulated_makespan_s: float
    error: float


@dataclass(frozen=True, slots=True)
class ArmFidelity:
    """All repeats of an arm on a workload; `error`: relative difference of the medians."""

    workload: str
    arm: str
    live_median_s: float
    live_least_s: float
    live_most_s: float
    simulated_median_s: float
    simulated_least_s: float
    simulated_most_s: float
    error: float
    live: Spent
    simulated: Spent


@dataclass(frozen=True, slots=True)
class Ranking:
    """Whether the simulator orders the arms of a workload as the live runs do.

    Attributes
    ----------
    live, simulated
        Arms, fastest first.
    decided
        Number of pairs of arms with disjoint live ranges; the others are ties.
    agreeing
        Number of decided pairs with the same order in the simulator.
    """

    workload: str
    live: tuple[str, ...]
    simulated: tuple[str, ...]
    decided: int
    agreeing: int

    @property
    def agrees(self) -> bool:
        """Whether all decided pairs agree."""
        return self.agreeing == self.decided


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The data of a live run for a comparison.

    Attributes
    ----------
    engines
        Names of the engines; a preset that places by a hash of names depends on them.
    """

    workload: str
    arm: str
    repeat: int
    makespan_s: float
    engines: tuple[str, ...]
    spent: Spent


_Pair = tuple[FidelityRow, Spent, Spent]
"""A live run and its simulated twin, and where their seconds went."""


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Result of a comparison."""

    engine: str
    rows: tuple[FidelityRow, ...]
    arms: tuple[ArmFidelity, ...]
    rankings: tuple[Ranking, ...]
    runs: tuple[LiveRun, ...]
    delays: ControlDelays


def check_arm(arm: Arm) -> None:
    """Refuse an arm that cannot be simulated or cannot run live.

    Raises
    ------
    BadInput
        A router's arm, or an unknown preset or part.
    """
    if arm.preset.startswith(ARM_PREFIX):
        raise BadInput(f"arm {arm.name}: no simulation of that router exists; use presets")
    build_strategies(arm.preset, overrides=arm.overrides)


async def run_live(
    workloads: Sequence[WatchedWorkload],
    fleet: Fleet,
    arms: Sequence[Arm],
    *,
    repeats: int,
    on_run: Callable[[LiveRun], None],
    has: Callable[[str, str, int], bool] = lambda workload, arm, repeat: False,
) -> None:
    """Run every arm live `repeats` times, arms in turn.

    Parameters
    ----------
    on_run
        Takes each run as it ends.
    has
        Whether the run of a workload, an arm and a repeat is there already.

    Raises
    ------
    BadInput
        See `measure_live` and `check_arm`; or a trace is given twice.
    """
    for arm in arms:
        check_arm(arm)
    by_name = {workload.name: workload for workload in workloads}
    if len(by_name) < len(workloads):
        raise BadInput("a trace is given twice: give each once")

    def take(row: LiveRow) -> None:
        replay = by_name[row.workload].replays.pop()
        lives, before = replay.lives, replay.cpu_before
        cpu = None if before is None else cpu_seconds().since(before)
        names = _engine_names(lives, fleet.engines)
        spent = spent_live(lives, row, cpu)
        on_run(LiveRun(row.workload, row.arm, row.repeat, row.makespan_s, names, spent))

    await measure_live(workloads, fleet, arms, repeats=repeats, on_row=take, has=has)


def run_of(row: Row) -> LiveRun:
    """A live run from its JSON form, which may have more fields."""
    run = {each.name: row[each.name] for each in fields(LiveRun)}
    return LiveRun(**{**run, "engines": tuple(row["engines"]), "spent": Spent(**row["spent"])})


def compare(runs: Sequence[LiveRun], workloads: Sequence[WatchedWorkload], twins: Twins) -> Fidelity:
    """Simulate every live run and compare; a twin takes only the engines' names from its live run.

    Raises
    ------
    BadInput
        There is no run, or a run is of another workload, or of an arm that cannot be simulated.
    """
    by_name = {workload.name: workload for workload in workloads}
    strange = [run.workload for run in runs if run.workload not in by_name]
    if strange or not runs:
        raise BadInput(f"no live runs of {', '.join(by_name)}, but of {', '.join(strange) or 'nothing'}")
    pairs = _with_twins(runs, by_name, twins)
    keys = dict.fromkeys((run.workload, run.arm) for run in runs)
    arms = tuple(_compared([pair for pair in pairs if (pair[0].workload, pair[0].arm) == key]) for key in keys)
    names = dict.fromkeys(run.workload for run in runs)
    rankings = tuple(ranking([arm for arm in arms if arm.workload == name]) for name in names)
    rows = tuple(row for row, _, _ in pairs)
    return Fidelity(twins.live.spec.kind, rows, arms, rankings, tuple(runs), twins.simulated.delays)


def read_runs(path: Path) -> list[LiveRun]:
    """The live runs in the JSON of an earlier comparison.

    Raises
    ------
    BadInput
        The file cannot be read, or contains no run.
    """
    try:
        return [run_of(run) for run in json.loads(path.read_text(encoding="utf-8"))["live"]]
    except OSError as error:
        raise BadInput(f"--live {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise BadInput(
            f"--live {path} holds no live runs: write it with `python -m benchmarks fidelity --json`"
        ) from None


def ranking(arms: Sequence[ArmFidelity]) -> Ranking:
    """The order of the arms of one workload, live and simulated; overlapping live ranges are ties."""
    decided = agreeing = 0
    for one, other in itertools.combinations(arms, 2):
        if one.live_least_s <= other.live_most_s and other.live_least_s <= one.live_most_s:
            continue
        decided += 1
        agreeing += (one.live_median_s < other.live_median_s) == (one.simulated_median_s < other.simulated_median_s)
    return Ranking(
        arms[0].workload,
        tuple(arm.arm for arm in sorted(arms, key=lambda arm: arm.live_median_s)),
        tuple(arm.arm for arm in sorted(arms, key=lambda arm: arm.simulated_median_s)),
        decided,
        agreeing,
    )


def as_json(found: Fidelity) -> dict[str, Any]:
    """The JSON object of ``python -m benchmarks fidelity``."""
    return {
        "rows": [asdict(row) for row in found.rows],
        "summary": [
            {**asdict(arm), "aim": aim_of(found.engine), "within_aim": abs(arm.error) <= aim_of(found.engine)}
            for arm in found.arms
        ],
        "rankings": [{**asdict(one), "agrees": one.agrees} for one in found.rankings],
        "delays": asdict(found.delays),
        "live": [asdict(run) for run in found.runs],
    }


def _engine_names(lives: Sequence[Life], engines: int) -> tuple[str, ...]:
    """Names of the engines that ran steps; engines without a step get other names."""
    seen = sorted({step.engine_id for life in lives for step in life.steps})
    return (*seen, *(f"idle-{number}" for number in range(engines - len(seen))))


def _with_twins(runs: Sequence[LiveRun], workloads: Mapping[str, WatchedWorkload], twins: Twins) -> list[_Pair]:
    plans: dict[str, tuple[Sequence[PlannedTrajectory], Sequence[PlannedTrajectory]]] = {}
    pairs = []
    for run in runs:
        workload, arm = workloads[run.workload], Arm.parse(run.arm)
        check_arm(arm)
        if run.workload not in plans:
            drawn, others = workload.planned(twins.live.spec.named_context_tokens)
            plans[run.workload] = workload.in_order(drawn), others
        fleet = _named(twins.simulated, run.engines)
        simulated_s, simulated = _simulated(workload.seed, *plans[run.workload], fleet, arm)
        row = FidelityRow(
            workload=run.workload,
            engine=twins.live.spec.kind,
            arm=run.arm,
            repeat=run.repeat,
            live_makespan_s=run.makespan_s,
            simulated_makespan_s=round(simulated_s, 3),
            error=round(simulated_s / run.makespan_s - 1, 4),
        )
        pairs.append((row, run.spent, simulated))
    return pairs


def _named(fleet: SimulatedFleet, names: Sequence[str]) -> SimulatedFleet:
    engines = tuple(
        (replace(description, engine_id=EngineId(name)), cost)
        for (description, cost), name in zip(fleet.engines, names, strict=True)
    )
    return replace(fleet, engines=engines)


def _simulated(
    seed: int,
    planned: Sequence[PlannedTrajectory],
    others: Sequence[PlannedTrajectory],
    fleet: SimulatedFleet,
    arm: Arm,
) -> tuple[float, Spent]:
    """Makespan from the first admission, and its components."""
    choice = build_strategies(arm.preset, overrides=arm.overrides).predictor
    # As live, an arm with its own source of a warm start uses that source.
    own = choice is not None and bool(choice.options.get("warm"))
    warm = None if own else others
    run = simulate(arm.preset, arm.overrides, fleet, planned, seed=seed, warm=warm, name=arm.name, watched=True)
    return run.makespan_s - first_admission_s(run), spent_simulated(run, planned, fleet.delays.slot_s)


def _compared(runs: Sequence[_Pair]) -> ArmFidelity:
    rows = [row for row, _, _ in runs]
    live = [row.live_makespan_s for row in rows]
    simulated = [row.simulated_makespan_s for row in rows]
    return ArmFidelity(
        rows[0].workload,
        rows[0].arm,
        live_median_s=round(median(live), 3),
        live_least_s=min(live),
        live_most_s=max(live),
        simulated_median_s=round(median(simulated), 3),
        simulated_least_s=min(simulated),
        simulated_most_s=max(simulated),
        error=round(median(simulated) / median(live) - 1, 4),
        live=mean_spent([spent for _, spent, _ in runs]),
        simulated=mean_spent([spent for _, _, spent in runs]),
    )
