"""What regrouping inside a rollout is worth: the same rollouts with and without it, in virtual time, row by row.

Engines are of one degree each, or of those that the resource manager chooses from the run's own predictions
(`paper_degrees`). The seconds that a merged engine takes to start vary; the strategy knows them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from heddle_dask.benchmarks.paper.degrees import degrees_by_predictions
from heddle_dask.benchmarks.paper.store import engines_text
from heddle_dask.core.errors import BadInput
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.rollout import simulate
from heddle_dask.sim.sweep import SimulatedWorkload
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.planned import PlannedTrajectory

PREDICTORS = ("oracle", "xgboost")
CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class RegroupConditions:
    """What is measured.

    Attributes
    ----------
    engines
        Degrees, one for all engines each; and ``"chosen"``.
    restarts_s
        Seconds until a merged engine answers.
    options
        Of the strategy part, as ``--set regrouping=merge-idle,`` takes them.
    """

    model: str
    cluster: Cluster
    workloads: Sequence[str]
    engines: Sequence[str]
    predictors: Sequence[str]
    restarts_s: Sequence[float]
    trajectories: int
    samples: int
    max_context_tokens: int
    options: str = ""

    def __post_init__(self) -> None:
        for name in self.predictors:
            if name not in PREDICTORS:
                raise BadInput(f"--predictors {name}: use some of {', '.join(PREDICTORS)}")
        for text in self.engines:
            if text != CHOSEN and not (text.isdigit() and int(text) > 0):
                raise BadInput(f"--engines {text}: use degrees, {CHOSEN}, or both, separated by commas")

    @property
    def part(self) -> str:
        """The strategy part that is measured."""
        return f"regrouping=merge-idle,{self.options}" if self.options else "regrouping=merge-idle"


@dataclass(frozen=True, slots=True)
class RegroupRow:
    """One rollout with regrouping, beside that without.

    Attributes
    ----------
    engines, degrees
        As asked for, and those that ran at first: ``8x1``.
    stay_s, regroup_s
        Makespans without and with.
    merges, ended, stopped
        Merged engines, those ended for them, and steps that were stopped to move their trajectory.
    """

    workload: str
    engines: str
    degrees: str
    predictor: str
    seed: int
    restart_s: float
    stay_s: float
    regroup_s: float
    merges: int
    ended: int
    stopped: int

    @property
    def gain(self) -> float:
        """Makespan without over makespan with."""
        return self.stay_s / self.regroup_s


def measure_regrouping(conditions: RegroupConditions, seeds: Sequence[int]) -> Iterator[RegroupRow]:
    """Every row as it is done."""
    if conditions.options:
        build_strategies("heddle", overrides=[conditions.part])
    for workload in conditions.workloads:
        work = SimulatedWorkload(
            workload, conditions.trajectories, conditions.samples, conditions.max_context_tokens
        )
        for seed in seeds:
            plans, earlier = work.drawn(seed), work.others(seed)
            for predictor in conditions.predictors:
                for engines in conditions.engines:
                    yield from _rows(conditions, workload, seed, plans, earlier, predictor, engines)


def _rows(
    conditions: RegroupConditions,
    workload: str,
    seed: int,
    plans: Sequence[PlannedTrajectory],
    earlier: Sequence[PlannedTrajectory],
    predictor: str,
    engines: str,
) -> Iterator[RegroupRow]:
    part = f"predictor={predictor}"
    if engines == CHOSEN:
        found = degrees_by_predictions(
            "heddle",
            [part],
            plans,
            earlier,
            conditions.model,
            conditions.cluster,
            conditions.max_context_tokens,
            seed=seed,
        )
        degrees = found.degrees
    else:
        degrees = replace(conditions.cluster, tp=int(engines)).degrees

    def rollout(overrides: Sequence[str], restart_s: float) -> Any:
        cluster = replace(conditions.cluster, tp=degrees, restart_s=restart_s)
        fleet = cluster.fleet(conditions.model, max_context_tokens=conditions.max_context_tokens)
        warm = None if predictor == "oracle" else earlier
        return simulate("heddle", [part, *overrides], fleet, plans, seed=seed, warm=warm)

    stay_s = rollout([], 0.0).makespan_s
    for restart_s in conditions.restarts_s:
        played = rollout([conditions.part], restart_s)
        counts = played.regroups
        yield RegroupRow(
            workload,
            engines,
            engines_text(degrees),
            predictor,
            seed,
            restart_s,
            round(stay_s, 3),
            round(played.makespan_s, 3),
            int(counts["merges"]),
            int(counts["engines"]),
            int(counts["evacuated"] + counts["attracted"]),
        )


def regrouping_table(rows: Sequence[RegroupRow]) -> list[str]:
    """Markdown: a line for each workload, predictor and start, a column for each restart; medians (least-most)."""
    restarts = list(dict.fromkeys(row.restart_s for row in rows))
    head = " | ".join(f"restart {restart_s:g} s: gain, merges" for restart_s in restarts)
    lines = [
        f"| workload | predictor | engines | makespan s without | {head} |",
        "|---" * (4 + len(restarts)) + "|",
    ]
    for key in dict.fromkeys((row.workload, row.predictor, row.engines) for row in rows):
        mine = [row for row in rows if (row.workload, row.predictor, row.engines) == key]
        degrees = ", ".join(dict.fromkeys(row.degrees for row in mine))
        cells = [
            f"{key[0]} | {key[1]} | {key[2]}: {degrees}"
            if key[2] == CHOSEN
            else f"{key[0]} | {key[1]} | {degrees}"
        ]
        first = [row.stay_s for row in mine if row.restart_s == restarts[0]]
        cells.append(f"{statistics.median(first):,.0f} ({min(first):,.0f}-{max(first):,.0f})")
        for restart_s in restarts:
            some = [row for row in mine if row.restart_s == restart_s]
            gains = [row.gain for row in some]
            merges = ", ".join(str(row.merges) for row in some)
            cells.append(f"{statistics.median(gains):.3f} ({min(gains):.3f}-{max(gains):.3f}), {merges}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def as_json(conditions: RegroupConditions, rows: Sequence[RegroupRow]) -> dict[str, Any]:
    """Conditions and rows."""
    described = {**asdict(conditions), "cluster": asdict(conditions.cluster)}
    return {"conditions": described, "rows": [{**asdict(row), "gain": round(row.gain, 4)} for row in rows]}
