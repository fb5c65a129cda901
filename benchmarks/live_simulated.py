"""Arms of ``python -m benchmarks live`` in simulated time, on engines of the same cost: limits are searched there.

On two cores a live run of 16 emulated engines takes minutes and is limited by the CPU; a simulated one takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.fidelity import check_arm
from benchmarks.fidelity_twins import delays_of
from benchmarks.live_setup import Fleet, LiveRow, Workload
from heddle_dask.core.ids import EngineId
from heddle_dask.core.nouns import EngineDescription
from heddle_dask.sim.fleet import SimulatedFleet
from heddle_dask.sim.rollout import Arm, SimulatedRollout, simulate


def simulate_live(
    workloads: Sequence[Workload],
    fleet: Fleet,
    arms: Sequence[Arm],
    *,
    warm: bool = True,
    on_row: Callable[[LiveRow], None],
    has: Callable[[str, str, int], bool],
) -> None:
    """Simulate every arm on every workload once, as `measure_live` would run it.

    The engines take the time of ``fleet.cost``, with the KV capacity and the time scale that it states.

    Raises
    ------
    BadInput
        A trace lacks a required field, a preset or part is unknown, or an arm is a router's, which has no simulation.
    """
    for arm in arms:
        check_arm(arm)
    for workload in workloads:
        planned, others = workload.planned(fleet.spec.named_context_tokens)
        engines = _simulated(fleet, workload.tasks)
        steps = sum(len(plan.steps) for plan in planned)
        for arm in arms:
            if has(workload.name, arm.name, 0):
                continue
            learnt = others if warm else None
            run = simulate(arm.preset, arm.overrides, engines, planned, seed=workload.seed, warm=learnt)
            on_row(replace(_row(workload, arm, run), steps=steps))


def _simulated(fleet: Fleet, trajectories: int) -> SimulatedFleet:
    described = [
        EngineDescription(
            EngineId(f"engine-{number}"),
            fleet.spec.named_slots,
            fleet.spec.named_context_tokens,
            kv_capacity_tokens=fleet.cost.capacity_tokens,
        )
        for number in range(fleet.engines)
    ]
    return SimulatedFleet(
        tuple((each, fleet.cost) for each in described),
        delays=delays_of(None, trajectories),
        believed={1: fleet.cost},
    )


def _row(workload: Workload, arm: Arm, run: SimulatedRollout) -> LiveRow:
    return LiveRow(
        workload=workload.name,
        arm=arm.name,
        repeat=0,
        tokens_per_s=round(run.tokens_per_s, 1),
        makespan_s=round(run.makespan_s, 3),
        bound_share=round(run.bound_share, 4),
        preemptions=run.preemptions,
        moves=dict(run.moves),
    )
