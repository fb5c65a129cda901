"""Components of the seconds of a rollout, with equal definitions live and simulated.

`benchmarks.fidelity` compares makespans; the components show why two of them differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from benchmarks.live_setup import LiveRow, Workload
from benchmarks.process_usage import CpuSeconds, cpu_seconds
from heddle_dask.environments.base import Context, Task
from heddle_dask.environments.replay import ReplayEnvironment
from heddle_dask.live.driver.programs.context import LiveContext
from heddle_dask.records.trajectory import ActionRecord, StepRecord
from heddle_dask.sim.rollout import SimulatedRollout
from heddle_dask.sim.timeline import Curve
from heddle_dask.workloads.planned import PlannedTrajectory


@dataclass(frozen=True, slots=True)
class Life:
    """One live trajectory: from its admission to its end, in seconds of this process's clock."""

    began_s: float
    ended_s: float
    steps: tuple[StepRecord, ...]
    actions: tuple[ActionRecord, ...]


class WatchedReplay(ReplayEnvironment):
    """A replay that records the `Life` of each trajectory, in the order of their ends."""

    def __init__(self, workload: Workload, salt: str, max_context_tokens: int | None) -> None:
        super().__init__(
            workload.trace,
            token_scale=workload.token_scale,
            tool_scale=workload.tool_scale,
            salt=salt,
            max_context_tokens=max_context_tokens,
        )
        self.lives: list[Life] = []
        self.cpu_before: CpuSeconds | None = None

    async def solve(self, task: Task, ctx: Context) -> float | None:
        """Replay one trajectory."""
        assert isinstance(ctx, LiveContext)
        if self.cpu_before is None:
            self.cpu_before = cpu_seconds()
        began_s = time.perf_counter()
        reward = await super().solve(task, ctx)
        self.lives.append(Life(began_s, time.perf_counter(), tuple(ctx.steps), tuple(ctx.actions)))
        return reward


@dataclass(frozen=True, slots=True)
class WatchedWorkload(Workload):
    """A workload that records its replays in `replays`, in order of construction."""

    replays: list[WatchedReplay] = field(default_factory=list, compare=False)

    def environment(self, salt: str = "", max_context_tokens: int | None = None) -> WatchedReplay:
        """A new environment over the file; another salt gives other tokens."""
        replay = WatchedReplay(self, salt, max_context_tokens)
        self.replays.append(replay)
        return replay

    def in_order(self, planned: Sequence[PlannedTrajectory]) -> list[PlannedTrajectory]:
        """The plans as submitted by a live run: in the order of its tasks, with the ids of their only attempts."""
        by_id = {plan.trajectory_id: plan for plan in planned}
        names = [task.task_id for task in self.environment().tasks(self.tasks, self.seed)]
        return [replace(by_id[name], trajectory_id=f"{name}/0") for name in names]


@dataclass(frozen=True, slots=True)
class Spent:
    """Components of the seconds of a run: means over its trajectories, except those of a step.

    Attributes
    ----------
    admitted_s
        Seconds from the first admission of the run to the trajectory's own.
    life_s
        Seconds from its admission to its end: the sum of the next three.
    engine_s, tools_s, between_s
        Seconds in batches of engines; in tools; and in neither (queues and transport).
    queue_s
        The part of `between_s` before steps begin. Live it includes the way back from the worker; simulated it ends
        with the admission to the batch.
    step_s
        Seconds of one step in a batch.
    held_s
        Additional seconds for which a step holds its slot, between worker and engine. Simulated: the whole time of an
        empty slot between two steps, including the worker's share.
    steps
        Number of steps.
    prefilled_tokens, cached_tokens
        Prompt tokens computed, and found in caches. Live, the prefilled tokens of preempted steps are unknown and
        left out.
    preemptions, moves
        Numbers of preempted steps and of moved contexts.
    engines_cpu_s, control_cpu_s
        CPU seconds of the whole live run: of engine processes, and of scheduler, workers and driver; 0: not known.
    """

    admitted_s: float
    life_s: float
    engine_s: float
    tools_s: float
    between_s: float
    queue_s: float
    step_s: float
    held_s: float
    steps: int
    prefilled_tokens: float
    cached_tokens: float
    preemptions: float
    moves: float
    engines_cpu_s: float = 0.0
    control_cpu_s: float = 0.0


def spent_live(lives: Sequence[Life], row: LiveRow, cpu: CpuSeconds | None = None) -> Spent:
    """Components of the seconds of a live run."""
    steps = [step for life in lives for step in life.steps]
    engine_s = sum(_in_batch_s(step) for step in steps)
    first_s = min(life.began_s for life in lives)
    whole = [step for step in steps if step.preemptions == 0]
    return _spent(
        trajectories=len(lives),
        steps=len(steps),
        admitted_s=sum(life.began_s - first_s for life in lives),
        life_s=sum(life.ended_s - life.began_s for life in lives),
        engine_s=engine_s,
        tools_s=sum(action.run_s for life in lives for action in life.actions),
        queue_s=sum(step.queue_s for step in steps),
        held_s=sum(step.finished_s - step.submitted_s - step.queue_s for step in steps) - engine_s,
        prefilled_tokens=sum(step.prompt_tokens - step.cached_tokens for step in whole),
        cached_tokens=sum(step.cached_tokens for step in steps),
        preemptions=row.preemptions,
        moves=_moves(row.moves),
        engines_cpu_s=0.0 if cpu is None else round(cpu.engines_s, 2),
        control_cpu_s=0.0 if cpu is None else round(cpu.control_s, 2),
    )


def spent_simulated(run: SimulatedRollout, planned: Sequence[PlannedTrajectory], slot_s: float) -> Spent:
    """Components of the seconds of a simulated run with a timeline; `slot_s` is that of its control plane."""
    assert run.timeline is not None
    steps = sum(len(plan.steps) for plan in planned)
    began_s = first_admission_s(run)
    life_s = _area(run.timeline.active, run.makespan_s)
    return _spent(
        trajectories=len(planned),
        steps=steps,
        admitted_s=sum(run.finished_s) - life_s - began_s * len(planned),
        life_s=life_s,
        engine_s=sum(_area(curve, run.makespan_s) for curve in run.timeline.running.values()),
        tools_s=sum(plan.tools_s for plan in planned),
        queue_s=sum(run.waited_s),
        held_s=steps * slot_s,
        prefilled_tokens=run.prefilled_tokens,
        cached_tokens=run.cached_tokens,
        preemptions=run.preemptions,
        moves=_moves(run.moves),
    )


def first_admission_s(run: SimulatedRollout) -> float:
    """Virtual seconds until the first admission in a run with a timeline, where live makespans begin."""
    assert run.timeline is not None
    return next(at for at, active in run.timeline.active if active)


def mean_spent(spent: Sequence[Spent]) -> Spent:
    """Means over runs of one arm."""
    names = [name for name in Spent.__slots__ if name != "steps"]
    means = {name: round(fmean(getattr(one, name) for one in spent), 4) for name in names}
    return Spent(steps=spent[0].steps, **means)


def _spent(*, trajectories: int, steps: int, **totals: float) -> Spent:
    """Means from sums over all trajectories."""
    means = {
        name: round(totals.pop(name) / trajectories, 4)
        for name in ("admitted_s", "life_s", "engine_s", "tools_s", "queue_s")
    }
    between_s = round(means["life_s"] - means["engine_s"] - means["tools_s"], 4)
    step_s = round(means["engine_s"] * trajectories / steps, 4)
    held_s = round(totals.pop("held_s") / steps, 5)
    return Spent(**means, between_s=between_s, step_s=step_s, held_s=held_s, steps=steps, **totals)


def _in_batch_s(step: StepRecord) -> float:
    """Seconds of a live step in batches.

    For an attempt stopped before its first token the engine reports no times; all seconds except waiting are counted
    then.
    """
    said_s = step.prefill_s + step.decode_s
    return step.finished_s - step.submitted_s - step.queue_s if math.isnan(said_s) else said_s


def _moves(moves: Mapping[str, Mapping[str, float]]) -> float:
    return sum(totals["started"] for totals in moves.values())


def _area(curve: Curve, until_s: float) -> float:
    """Integral of a step curve."""
    ends = [at for at, _ in curve[1:]] + [until_s]
    return sum(number * max(0.0, end - at) for (at, number), end in zip(curve, ends, strict=True))
