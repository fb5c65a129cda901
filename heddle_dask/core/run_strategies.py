"""The strategies of the open runs: each run has its own, with its own view of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from heddle_dask.core.entities import Engine, Trajectory
from heddle_dask.core.events import StepFinished
from heddle_dask.core.ids import EngineId, RunId, TrajectoryId
from heddle_dask.core.optional_parts import offers
from heddle_dask.core.run_description import RetryPolicy, RunDescription
from heddle_dask.core.run_record import RunRecord
from heddle_dask.core.state import State
from heddle_dask.core.view import (
    ActionAllocation,
    ClusterView,
    ForgetsTrajectories,
    ObservesSteps,
    RanksWaiting,
    StrategySet,
)


class RunView(ClusterView):
    """The cluster as one run sees it. Loads of engines are of all runs, totals and what waits are its own."""

    __slots__ = ("_run",)

    def __init__(self, state: State, run: RunRecord) -> None:
        super().__init__(state)
        self._run = run

    @property
    def unadmitted(self) -> Iterable[Trajectory]:
        return (self._state.trajectories[i] for i in self._run.unadmitted)

    @property
    def waiting(self) -> int:
        return len(self._run.unadmitted)

    @property
    def freed(self) -> Iterable[EngineId]:
        return self._run.freed

    @property
    def sampled_tokens(self) -> int:
        return self._run.sampled_tokens

    @property
    def observed_tokens(self) -> int:
        return self._run.observed_tokens

    @property
    def observed_per_token(self) -> float | None:
        return self._run.observed_per_token

    @property
    def expected_tokens(self) -> int:
        return self._run.expected_tokens

    @property
    def alive(self) -> int:
        return self._run.alive

    def is_own(self, trajectory: Trajectory) -> bool:
        return trajectory.spec.run_id == self._run.description.run_id

    def queued(self, engine: Engine) -> int:
        if not engine.held:
            return len(engine.inflight)
        return len(engine.inflight) - engine.held + engine.held_of.get(self._run.description.run_id, 0)

    @property
    def reservations(self) -> int:
        return self._run.reservations


BuildStrategies = Callable[[RunDescription], StrategySet]


@dataclass(slots=True, eq=False)
class RunStrategies:
    """The strategies of one run.

    Attributes
    ----------
    unplanned, unplaced
        Its trajectories that no placement has planned, and those that are planned and have no step placed yet (dicts
        used as ordered sets).
    """

    run_id: RunId
    strategies: StrategySet
    retries: RetryPolicy
    view: RunView
    unplanned: dict[TrajectoryId, None] = field(default_factory=dict)
    unplaced: dict[TrajectoryId, None] = field(default_factory=dict)

    def rank(self, trajectory: Trajectory) -> None:
        """Pass a waiting trajectory with a new prediction to an admission that keeps a queue."""
        admission = self.strategies.admission
        if offers(admission, RanksWaiting):
            admission.rank(trajectory)

    def forget(self, trajectory: Trajectory) -> None:
        """Drop what strategies keep of an ended trajectory."""
        self.unplanned.pop(trajectory.trajectory_id, None)
        self.unplaced.pop(trajectory.trajectory_id, None)
        for part in (self.strategies.migration, self.strategies.affinity, self.strategies.admission):
            if offers(part, ForgetsTrajectories):
                part.forget(trajectory)

    def step_answered(self, trajectory: Trajectory, answer: StepFinished) -> None:
        """Show an answer to an affinity that learns."""
        affinity = self.strategies.affinity
        if offers(affinity, ObservesSteps):
            affinity.step_answered(trajectory, answer)


class StrategyTable:
    """The strategies of all open runs."""

    def __init__(self, state: State, build: BuildStrategies | None) -> None:
        self._state = state
        self._build = build
        self._by_run: dict[RunId, RunStrategies] = {}

    def add(self, description: RunDescription, strategies: StrategySet | None = None) -> None:
        """Add a run; its strategies are built unless they are given."""
        if strategies is None:
            if self._build is None:
                raise ValueError(f"run {description.run_id} cannot join: this controller builds no strategies")
            strategies = self._build(description)
        self._state.add_run(description)
        view = RunView(self._state, self._state.runs[description.run_id])
        self._by_run[description.run_id] = RunStrategies(description.run_id, strategies, description.retries, view)

    def remove(self, run_id: RunId) -> None:
        del self._by_run[run_id]
        del self._state.runs[run_id]
        self._state.fair.leave(run_id)

    @property
    def allocation(self) -> ActionAllocation:
        """The cluster's allocation of actions: what all open runs ask for, else that of a run that asks for nothing."""
        first, *others = (run.strategies.actions for run in self)
        if self._build is None or all(each == first for each in others):
            return first
        return self._build(RunDescription()).actions

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._by_run

    def __getitem__(self, run_id: RunId) -> RunStrategies:
        return self._by_run[run_id]

    def __iter__(self) -> Iterator[RunStrategies]:
        return iter(self._by_run.values())

    def of(self, trajectory: Trajectory) -> RunStrategies:
        """Those of the run of a trajectory that has not ended."""
        return self._by_run[trajectory.spec.run_id]

    def in_turn(self) -> list[RunStrategies]:
        """Those of all runs, in the order in which runs are served next."""
        if len(self._by_run) < 2:
            return list(self._by_run.values())
        return [self._by_run[run_id] for run_id in self._state.fair.in_turn(self._by_run)]
