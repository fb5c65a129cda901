"""Heddle's evaluation, simulated: three models, three workloads, baselines and forms of heddle, run by run.

Every baseline and every form of heddle runs with the first seed at every feasible uniform TP degree, and with the
other seeds at the paper's degree and at its own best degree of the first seed. Heddle also runs on the mix of degrees
that the resource manager chooses from predicted work (`paper.degrees`). The ablations replace a part of heddle by the
baseline's, on the same mix, with exact predictions, so that the effect of a part does not depend on the predictor.
All arms of a seed run the same trajectories, from cold caches.

The constants below are from the paper (arXiv 2603.28101v1, sections 7.1 to 7.5), with comments on their
interpretation. No constant was chosen to reproduce a ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

from benchmarks.deadline import EXACT
from benchmarks.paper.degrees import degrees_by_predictions, fleets_that_fit
from benchmarks.row_file import CONDITIONS, Row
from benchmarks.runner import LastFew, Runner, SweepRun
from benchmarks.tables import names
from heddle_dask.core.errors import BadInput
from heddle_dask.cost.published import model_of
from heddle_dask.sim.bound import MakespanBound, makespan_bound
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.rollout import Arm, SimulatedRollout, simulate
from heddle_dask.sim.sweep import SimulatedWorkload
from heddle_dask.strategies.presets import build_strategies
from heddle_dask.workloads.planned import PlannedTrajectory

PAPER_DEGREES = {"qwen3-14b": 1, "qwen3-8b": 1, "qwen3-32b": 2}
"""TP degree of the baselines' engines (7.2). 14B first: the paper's ablations use it."""
WORKLOADS = ("coding", "search", "math")
PER_ENGINE = 100
"""Trajectories for each engine of a baseline (7.2: batch size 100 per rollout worker, heddle the same global batch)."""

Role = Literal["baselines", "ours", "ablations"]


@dataclass(frozen=True, slots=True)
class PaperArm:
    """One column of the comparison.

    Attributes
    ----------
    name
        Name in tables and in ``--arms``.
    replaced
        For an ablation: the replaced part of heddle.
    """

    name: str
    role: Role
    arm: Arm
    replaced: str = ""

    @property
    def predictor(self) -> str:
        """Name of the predictor for the choice of degrees; empty without one."""
        choice = build_strategies(self.arm.preset, overrides=self.arm.overrides).predictor
        return "" if choice is None else choice.name


def _arm(name: str, role: Role, text: str, replaced: str = "") -> PaperArm:
    return PaperArm(name, role, Arm.parse(text), replaced)


_HYBRID = "placement=cache-aware,skew_steps=32,skew_ratio=1.0:migration=none"
PAPER_ARMS = (
    *(_arm(name, "baselines", name) for name in ("verl", "verl-hybrid", "slime", "sticky-least-loaded")),
    _arm("heddle", "ours", "heddle"),
    _arm("heddle-oracle", "ours", EXACT),
    _arm("heddle-paper", "ours", "heddle-paper"),
    _arm("heddle-paper-oracle", "ours", "heddle-paper:predictor=oracle"),
    _arm("fcfs", "ablations", f"{EXACT}:scheduling=fcfs:preemption=none", "scheduling"),
    _arm("least-attained", "ablations", f"{EXACT}:scheduling=least-attained", "scheduling"),
    _arm("hybrid", "ablations", f"{EXACT}:{_HYBRID}", "placement and migration"),
    _arm("pinned", "ablations", f"{EXACT}:placement=sticky:migration=none", "placement and migration"),
    _arm("unlimited", "ablations", f"{EXACT}:admission=unlimited", "admission"),
    _arm(
        "hybrid-unlimited",
        "ablations",
        f"{EXACT}:{_HYBRID}:admission=unlimited",
        "placement, migration and admission",
    ),
)


@dataclass(frozen=True, slots=True)
class PaperCell:
    """A model and a workload."""

    model: str
    workload: str

    @property
    def name(self) -> str:
        """Name in ``--cells``."""
        return f"{self.model}/{self.workload}"


PAPER_CELLS = tuple(PaperCell(model, workload) for model in PAPER_DEGREES for workload in WORKLOADS)

MEMORY_SHORT = "memory-short"
"""A workload beside the paper's: recorded coding sessions, whose contexts exceed the KV memory several times."""
_MEMORY_SHORT_TRACE, _MEMORY_SHORT_TOKENS, _MEMORY_SHORT_TOOLS = "claude_code_transcripts", 0.3, 0.05
_MORE_CELLS = tuple(PaperCell(model, MEMORY_SHORT) for model in PAPER_DEGREES)


def cells_named(text: str) -> list[PaperCell]:
    """Cells by ``model/workload``, all of a model, all of a workload, or ``all`` of the paper; commas between.

    ``memory-short`` is a workload too.

    Raises
    ------
    BadInput
        There is no such cell.
    """
    found: list[PaperCell] = []
    for name in _names(text, "--cells"):
        some = [c for c in PAPER_CELLS if name in (c.name, c.model, c.workload, "all")]
        some = some or [c for c in _MORE_CELLS if name in (c.name, c.workload)]
        if not some:
            raise BadInput(
                f"--cells {name}: use all, {', '.join(PAPER_DEGREES)}, {', '.join(WORKLOADS)}, or MODEL/WORKLOAD"
            )
        found += some
    return list(dict.fromkeys(found))


def arms_named(text: str) -> list[PaperArm]:
    """Arms by name, by role, or ``all``; commas between. In the order of `PAPER_ARMS`.

    Raises
    ------
    BadInput
        There is no such arm.
    """
    wanted = _names(text, "--arms")
    for name in wanted:
        if not any(name in (arm.name, arm.role, "all") for arm in PAPER_ARMS):
            known = ", ".join(arm.name for arm in PAPER_ARMS)
            raise BadInput(f"--arms {name}: use all, baselines, ours, ablations, or some of {known}")
    return [arm for arm in PAPER_ARMS if {arm.name, arm.role, "all"}.intersection(wanted)]


def _names(text: str, option: str) -> list[str]:
    found = names(text)
    if not found:
        raise BadInput(f"{option} names nothing: give one or more, separated by commas")
    return found


@dataclass(frozen=True, slots=True)
class PaperConditions:
    """Conditions that are equal for all runs.

    Attributes
    ----------
    cluster_name
        Name of the cluster in rows.
    trajectories
        Trajectories of every run; None: the paper's 100 for each engine of the baselines.
    """

    cluster_name: str
    cluster: Cluster
    trajectories: int | None
    samples: int
    max_context_tokens: int

    def drawn(self, cell: PaperCell) -> SimulatedWorkload:
        """The workload of a cell, to draw for each seed."""
        count = self.trajectories
        if count is None:
            engines = self.cluster.gpus // PAPER_DEGREES[cell.model]
            count = max(self.samples, PER_ENGINE * engines // self.samples * self.samples)
        if cell.workload == MEMORY_SHORT:
            scales = _MEMORY_SHORT_TOKENS, _MEMORY_SHORT_TOOLS
            return SimulatedWorkload(_MEMORY_SHORT_TRACE, count, 1, self.max_context_tokens, *scales)
        return SimulatedWorkload(cell.workload, count, self.samples, self.max_context_tokens)

    def key(self, cell: PaperCell, seed: int) -> dict[str, Any]:
        """Key fields that the rows of a cell and seed share."""
        return {
            "model": cell.model,
            "workload": cell.workload,
            "seed": seed,
            "cluster": self.cluster_name,
            "trajectories": self.drawn(cell).trajectories,
            "samples": self.samples,
            "max_context_tokens": self.max_context_tokens,
        }


class DrawnCell:
    """The trajectories of one seed of a cell: made on demand, shared by its arms."""

    def __init__(self, conditions: PaperConditions, cell: PaperCell, seed: int) -> None:
        self.cell, self.seed, self.conditions = cell, seed, conditions
        self._work = conditions.drawn(cell)
        self._bounds: dict[str, MakespanBound] = {}

    @cached_property
    def plans(self) -> list[PlannedTrajectory]:
        """The trajectories."""
        return self._work.drawn(self.seed)

    @cached_property
    def earlier(self) -> list[PlannedTrajectory]:
        """Trajectories of other groups, for warm predictors."""
        return self._work.others(self.seed)

    def simulated(self, arm: PaperArm, degrees: tuple[int, ...]) -> SimulatedRollout:
        """Run an arm on engines of these TP degrees."""
        cluster = replace(self.conditions.cluster, tp=degrees)
        fleet = cluster.fleet(self.cell.model, max_context_tokens=self.conditions.max_context_tokens)
        engines = engines_text(degrees)
        if engines not in self._bounds:
            self._bounds[engines] = makespan_bound(self.plans, fleet)
        return simulate(
            arm.arm.preset,
            arm.arm.overrides,
            fleet,
            self.plans,
            seed=self.seed,
            warm=self.earlier if arm.predictor == "xgboost" else None,
            name=arm.name,
            bound=self._bounds[engines],
        )

    def chosen(self, arm: PaperArm) -> dict[str, Any]:
        """The choice of the resource manager from the predictions of this arm."""
        found = degrees_by_predictions(
            arm.arm.preset,
            arm.arm.overrides,
            self.plans,
            self.earlier,
            self.cell.model,
            self.conditions.cluster,
            self.conditions.max_context_tokens,
            seed=self.seed,
        )
        return {
            "engines": engines_text(found.tp_degrees),
            "degrees": list(found.tp_degrees),
            "predicted_s": round(found.expected_makespan_s or 0.0, 3),
            "uniform_s": {str(degree): round(s, 3) for degree, s in found.uniform_s if s is not None},
        }


def engines_text(degrees: Sequence[int]) -> str:
    """Engines by TP degree, largest first: ``16x4``, ``3x8+10x4``."""
    return "+".join(f"{degrees.count(d)}x{d}" for d in sorted(dict.fromkeys(degrees), reverse=True))


_drawn = LastFew(DrawnCell)


def paper_run(
    conditions: PaperConditions, cell: PaperCell, seed: int, arm: PaperArm, degrees: tuple[int, ...]
) -> SweepRun:
    """A rollout on engines of these TP degrees."""
    key = {
        "kind": "run",
        **conditions.key(cell, seed),
        "arm": arm.name,
        "engines": engines_text(degrees),
    }
    return SweepRun(key, partial(_simulated, conditions, cell, seed, arm, degrees))


def _simulated(conditions: PaperConditions, cell: PaperCell, seed: int, arm: PaperArm, degrees: tuple[int, ...]) -> Row:
    return stored_figures(_drawn(conditions, cell, seed).simulated(arm, degrees))


def paper_choice(conditions: PaperConditions, cell: PaperCell, seed: int, arm: PaperArm) -> SweepRun:
    """The choice of degrees from the predictions of an arm; arms with one predictor share it."""
    key = {"kind": "degrees", **conditions.key(cell, seed), "predictor": arm.predictor}
    return SweepRun(key, partial(_chosen, conditions, cell, seed, arm))


def _chosen(conditions: PaperConditions, cell: PaperCell, seed: int, arm: PaperArm) -> Row:
    return _drawn(conditions, cell, seed).chosen(arm)


def told(row: Row) -> str:
    """A new row in a line."""
    where = f"{row['model']}/{row['workload']}"
    if row["kind"] == "degrees":
        return f"{where}, degrees by {row['predictor']}, seed {row['seed']}: {row['engines']}"
    return (
        f"{where}, {row['arm']} on {row['engines']}, seed {row['seed']}: {row['makespan_s']:,.1f} s, "
        f"{row['bound_share']:.1%} of the bound"
    )


class PaperSweep:
    """All runs of some cells, arms and seeds.

    Parameters
    ----------
    only_chosen
        Run arms with a predictor only on the degrees that the resource manager chose, not on uniform ones.

    Raises
    ------
    BadInput
        The file has runs under other conditions, or a model does not fit at the paper's TP degree.
    """

    def __init__(
        self,
        conditions: PaperConditions,
        cells: Sequence[PaperCell],
        arms: Sequence[PaperArm],
        seeds: Sequence[int],
        runner: Runner,
        *,
        only_chosen: bool = False,
    ) -> None:
        self._conditions, self._cells, self._seeds, self._runner = conditions, cells, seeds, runner
        self._planned = [arm for arm in arms if arm.predictor]
        self._uniform = [arm for arm in arms if arm.role == "baselines" or (arm.role == "ours" and not only_chosen)]
        self._degrees = {cell.model: self._degrees_of(cell.model) for cell in cells}
        wanted = {cell.model: conditions.key(cell, 0) for cell in cells}
        for row in runner.rows.rows("run"):
            key = wanted.get(row["model"], row)
            for name in CONDITIONS:
                if row[name] != key[name]:
                    raise BadInput(
                        f"--out has runs of {row['model']} with {name} {row[name]}, not {key[name]}: give another file"
                    )

    def play(self) -> None:
        """Choose degrees; then run on them, and the first seed on all uniform ones; then the others on its best."""
        self._runner.played(self._choices(), told)
        self._runner.played(self._first_runs(), told)
        self._runner.played(self._later_runs(), told)

    def _choices(self) -> Iterator[SweepRun]:
        for cell in self._cells:
            for seed in self._seeds:
                for arm in self._planned:
                    yield paper_choice(self._conditions, cell, seed, arm)

    def _first_runs(self) -> Iterator[SweepRun]:
        for cell in self._cells:
            for seed in self._seeds:
                if seed == self._seeds[0]:
                    for arm in self._uniform:
                        yield from self._on(cell, seed, arm, self._degrees[cell.model])
                for arm in self._planned:
                    choice = self._runner.rows.find(paper_choice(self._conditions, cell, seed, arm).key)
                    assert choice is not None
                    yield paper_run(self._conditions, cell, seed, arm, tuple(choice["degrees"]))

    def _later_runs(self) -> Iterator[SweepRun]:
        for cell in self._cells:
            for seed in self._seeds[1:]:
                for arm in self._uniform:
                    best = self._best_degree(cell, arm)
                    yield from self._on(cell, seed, arm, (PAPER_DEGREES[cell.model], best))

    def _on(self, cell: PaperCell, seed: int, arm: PaperArm, degrees: Iterable[int]) -> Iterator[SweepRun]:
        for degree in degrees:
            engines = replace(self._conditions.cluster, tp=degree).tp_degrees
            yield paper_run(self._conditions, cell, seed, arm, engines)

    def _best_degree(self, cell: PaperCell, arm: PaperArm) -> int:
        """Best uniform degree of the first seed, whose runs at all degrees are done."""
        degrees = self._degrees[cell.model]
        rows = self._runner.played(self._on(cell, self._seeds[0], arm, degrees), told)
        return min(zip(degrees, rows, strict=True), key=lambda pair: pair[1]["makespan_s"])[0]

    def _degrees_of(self, model: str) -> tuple[int, ...]:
        conditions = self._conditions
        degrees = tuple(fleets_that_fit(model_of(model), conditions.cluster, conditions.max_context_tokens))
        if PAPER_DEGREES[model] not in degrees:
            raise BadInput(
                f"{model} does not run at the paper's degree {PAPER_DEGREES[model]} with a context of "
                f"{conditions.max_context_tokens} tokens: shorten it"
            )
        return degrees


def stored_figures(rollout: SimulatedRollout) -> dict[str, Any]:
    """The figures of a run that its row holds, beside its key."""
    figures = rollout.figures()
    for name in ("strategy", "seed", "trajectories", "bounds_s"):
        del figures[name]
    moves: Any = figures["moves"]
    figures["moves"] = {kind: {name: of[name] for name in ("started", "failed")} for kind, of in moves.items()}
    return figures
