"""The simulated rollouts of `benchmarks.behaviour`: workload by seed by strategy.

Sizes are small, so that all of them take minutes, and memory or slots are short, so that trajectories wait, are
preempted, moved and evicted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from benchmarks.deadline import ARM, EXACT
from benchmarks.normalised_commands import canonical, command_rows
from heddle_dask.core.commands import Command
from heddle_dask.core.events import Event, StepFinished
from heddle_dask.sim.bound import MakespanBound
from heddle_dask.sim.clusters import Cluster
from heddle_dask.sim.fleet import SimulatedFaults
from heddle_dask.sim.rollout import Arm, simulate
from heddle_dask.sim.sweep import SimulatedWorkload
from heddle_dask.strategies.presets import PRESETS
from heddle_dask.workloads.planned import PlannedTrajectory

MODEL = "qwen3-14b"
WARM_TRAJECTORIES = 320
# An admission later than this waited for other trajectories to end, not for the first predictions.
_WAITED_S = 5.0
_NO_BOUND = MakespanBound(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Condition:
    """A workload and a cluster, with the strategies to run.

    Attributes
    ----------
    arms
        Strategies in the form of `sim.rollout.Arm.parse`, by the label of the cell: renaming a part changes the text
        but not the label.
    once
        Further strategies for the first seed only.
    """

    name: str
    workload: SimulatedWorkload
    cluster: Cluster
    arms: Mapping[str, str]
    once: Mapping[str, str]
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class BehaviourCell:
    """One rollout."""

    condition: Condition
    label: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Unique name of the cell."""
        return f"{self.condition.name}/{self.seed}/{self.label}"


_ORACLE = ":predictor=oracle"
_PRESETS = {**{name: name for name in PRESETS}, "heddle-deadline": ARM}
_WITH_PREDICTOR = [name for name, parts in PRESETS.items() if parts["predictor"] != "none"]
_ORACLES = {f"{name}, oracle": f"{name}{_ORACLE}" for name in _WITH_PREDICTOR}
# `heddle` admitted by a deadline where predictions were exact; these labels are of that time.
_ORACLES["heddle, oracle"] = EXACT
_REPLACED = {
    "heddle, no predictor": "heddle:predictor=none",
    "heddle, no predictor, kv-forecast": "heddle:predictor=none:admission=kv-forecast",
    "heddle, oracle that errs": f"heddle{_ORACLE},error_factor=2",
    "heddle, oracle, no deadline": f"heddle{_ORACLE}",
    "heddle, oracle, kv-forecast": f"heddle{_ORACLE}:admission=kv-forecast",
    "heddle, oracle, at-most": f"heddle{_ORACLE}:admission=at-most,alive=48",
    "heddle, oracle, unlimited": f"heddle{_ORACLE}:admission=unlimited",
    "heddle, oracle, group-first": f"{EXACT}:scheduling=group-first",
    "heddle, oracle, least-attained": f"{EXACT}:scheduling=least-attained",
    "heddle, oracle, no moves": f"{EXACT}:migration=none",
    "heddle-paper, oracle, priced moves": f"heddle-paper{_ORACLE}:migration=priced",
    "sticky, at-most": "sticky:admission=at-most,alive=64",
    "cache-aware, kv-forecast": "cache-aware:admission=kv-forecast",
    "sticky-least-loaded, additive increase": "sticky-least-loaded:admission=additive-increase",
}
_LEARNED = {
    "heddle, kv-forecast": "heddle:admission=kv-forecast",
    "heddle, at-most": "heddle:admission=at-most,alive=48",
    "heddle, group-first": "heddle:scheduling=group-first",
}
_FAULTY = {
    label: arm
    for label, arm in {**_PRESETS, **_ORACLES, **_REPLACED}.items()
    if arm not in (*_WITH_PREDICTOR, ARM)  # Learning takes most of a rollout, and the other conditions have it.
}
_EIGHT = Cluster(gpus=8, slots=8)
_CONTEXT_TOKENS = 40_960
_LONG_CONTEXT_TOKENS = 131_072


def _plain(name: str) -> Condition:
    workload = SimulatedWorkload(name, 160, 16, _CONTEXT_TOKENS)
    return Condition(name, workload, _EIGHT, {**_PRESETS, **_ORACLES}, {**_REPLACED, **_LEARNED})


_CONDITIONS = (
    _plain("coding"),
    _plain("search"),
    _plain("math"),
    Condition(  # contexts exceed the KV memory several times
        "memory",
        SimulatedWorkload("search", 256, 16, _LONG_CONTEXT_TOKENS, 6.0, 0.1),
        replace(_EIGHT, slots=32),
        {**_PRESETS, **_ORACLES},
        _REPLACED,
    ),
    Condition(
        "memory-trace",
        SimulatedWorkload("claude_code_transcripts", 300, 1, _LONG_CONTEXT_TOKENS, 0.3, 0.05),
        Cluster(gpus=4, gpus_per_node=4, slots=32),
        {**_PRESETS, **_ORACLES},
        _REPLACED,
        seeds=(30, 31, 32),
    ),
    Condition(  # engines of several degrees that die, tools that fail and wait for CPUs
        "faults",
        SimulatedWorkload("search", 160, 16, _CONTEXT_TOKENS),
        Cluster(
            gpus=8,
            tp=(2, 2, 1, 1, 1, 1),
            slots=8,
            tool_cpus=12,
            believed_gpu="a100-80g",
            faults=SimulatedFaults(
                engines_lost={1: 40.0},
                tool_failure_share=0.05,
                engine_mtbf_s=400.0,
                engine_restart_s=20.0,
            ),
        ),
        {},
        _FAULTY,
        seeds=(0,),
    ),
    Condition(
        "walltime",
        SimulatedWorkload("coding", 160, 16, _CONTEXT_TOKENS),
        replace(_EIGHT, kv_transfer=False, faults=SimulatedFaults(walltime_s=200.0)),
        {},
        _FAULTY,
        seeds=(0,),
    ),
)


def all_cells() -> list[BehaviourCell]:
    """Every cell, in a fixed order."""
    cells = []
    for condition in _CONDITIONS:
        for number, seed in enumerate(condition.seeds):
            arms = condition.arms if number else {**condition.arms, **condition.once}
            cells += [BehaviourCell(condition, label, arm, seed) for label, arm in arms.items()]
    return cells


@dataclass(slots=True)
class CommandStream:
    """The commands of a simulated world as lines.

    Attributes
    ----------
    lines
        One per command, in order: virtual time, type and leaves; kept if `keeps` is set.
    counts
        Commands by type.
    steps
        Number of complete steps.
    waited
        Number of trajectories admitted after `_WAITED_S`.
    """

    keeps: bool = False
    lines: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    waited: int = 0
    _digest: hashlib._Hash = field(init=False, default_factory=hashlib.sha256)

    def watch(self, event: Event, commands: Sequence[Command]) -> None:
        """Add one event with its commands."""
        self.steps += type(event) is StepFinished and event.finish_reason != "abort"
        for kind, leaves in command_rows(commands):
            self.counts[kind] += 1
            self.waited += kind == "AdmitTrajectory" and event.at > _WAITED_S
            line = f"{event.at!r} {kind} {canonical(leaves)}\n"
            self._digest.update(line.encode())
            if self.keeps:
                self.lines.append(line)

    @property
    def digest(self) -> str:
        """SHA-256 of all lines."""
        return self._digest.hexdigest()


def play(cell: BehaviourCell, stream: CommandStream) -> dict[str, object]:
    """Simulate a cell; its figures, which are the same in every process.

    Raises
    ------
    BadInput
        The trace cannot be read.
    """
    arm = Arm.parse(cell.arm)
    plans, earlier = _drawn(cell.condition.workload, cell.seed)
    fleet = cell.condition.cluster.fleet(MODEL, max_context_tokens=cell.condition.workload.max_context_tokens)
    rollout = simulate(
        arm.preset,
        arm.overrides,
        fleet,
        plans,
        seed=cell.seed,
        warm=earlier,
        bound=_NO_BOUND,
        watch=stream.watch,
    )
    return {
        "makespan_s": rollout.makespan_s,
        "tokens": rollout.tokens,
        "steps": stream.steps,
        "completed": rollout.completed,
        "preemptions": rollout.preemptions,
        "kv_preemptions": rollout.kv_preemptions,
        "prefilled_tokens": rollout.prefilled_tokens,
        "cached_tokens": rollout.cached_tokens,
        "moves": {
            kind: {"started": totals["started"], "failed": totals["failed"]}
            for kind, totals in sorted(rollout.moves.items())
        },
        "admitted_late": stream.waited,
        "commands": dict(sorted(stream.counts.items())),
        "digest": stream.digest,
    }


@lru_cache(maxsize=2)
def _drawn(workload: SimulatedWorkload, seed: int) -> tuple[list[PlannedTrajectory], list[PlannedTrajectory]]:
    """Trajectories to play, and those for the warm start of a predictor."""
    return workload.drawn(seed), workload.others(seed)[:WARM_TRAJECTORIES]
