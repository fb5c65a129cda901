"""Versions, credits and ages at one moment, for displays and for the training loop; no decision reads them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from heddle_dask.core.ids import EngineId, RunId
from heddle_dask.core.policy_version import PolicyVersion
from heddle_dask.core.state import State
from heddle_dask.core.transitions import EngineState, TrajectoryState


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """The weights of one engine at one moment.

    Attributes
    ----------
    installed, target
        The version that it samples with, and the one that it is about to get (None: none).
    state, cause
        A `WeightsState` by value, and why the latest fetch or installation failed (empty: it did not).
    """

    engine_id: EngineId
    installed: PolicyVersion
    target: PolicyVersion | None
    state: str
    cause: str


@dataclass(frozen=True, slots=True)
class StalenessCounts:
    """The account of one run with a bound at one moment.

    Attributes
    ----------
    optimizer_steps
        n.
    credits, accepted, running
        As in `StalenessBound.credits`.
    without_credit
        Submitted trajectories that wait for a credit.
    cancelled
        Cancelled trajectories by cause.
    ages
        Running trajectories that have begun, by n - b; those of another line of training under -1.
    """

    optimizer_steps: int
    credits: int
    accepted: int
    running: int
    without_credit: int
    cancelled: dict[str, int] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)


def engine_versions(state: State) -> tuple[EngineVersion, ...]:
    """The weights of the engines that take steps, or will once they have newer weights; in the order of joining."""
    return tuple(
        EngineVersion(
            engine.engine_id,
            engine.weights.installed,
            engine.weights.target,
            engine.weights.state.value,
            engine.weights.cause,
        )
        for engine in state.engines.values()
        if engine.state in (EngineState.READY, EngineState.LOADING)
    )


def staleness_counts(state: State, run_id: RunId) -> StalenessCounts | None:
    """The account of one run; None without a bound. O(trajectories)."""
    run = state.runs.get(run_id)
    if run is None or run.ledger is None:
        return None
    ages: Counter[int] = Counter()
    for trajectory in state.trajectories.values():
        first = trajectory.first_version
        alive = trajectory.spec.run_id == run_id and trajectory.state is not TrajectoryState.ENDED
        if alive and first is not None and trajectory.parent is None and not trajectory.cancelled:
            age = run.ledger.age(first)
            ages[-1 if age is None else max(0, age)] += 1
    return StalenessCounts(
        run.ledger.version.number,
        run.ledger.credits,
        run.ledger.accepted,
        run.ledger.running,
        len(run.without_credit),
        dict(run.cancelled),
        dict(sorted(ages.items())),
    )


def training_counts(state: State, run_id: RunId) -> dict[str, Any]:
    """JSON-able: versions of the engines in use and the account of the run; empty where nothing is trained."""
    counts: dict[str, Any] = {}
    if state.weights.published is not None:
        ready = [engine for engine in state.engines.values() if engine.state is EngineState.READY]
        counts["versions"] = dict(sorted(Counter(str(engine.version) for engine in ready).items()))
        counts["published"] = str(state.weights.published)
    account = staleness_counts(state, run_id)
    if account is not None:
        counts["staleness"] = {
            "optimizer_steps": account.optimizer_steps,
            "credits": account.credits,
            "accepted": account.accepted,
            "running": account.running,
            "without_credit": account.without_credit,
            "cancelled": account.cancelled,
            "ages": {str(age): count for age, count in account.ages.items()},
        }
    return counts
