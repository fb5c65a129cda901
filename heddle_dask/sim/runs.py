"""Several runs in one simulated world: what joins when, each with its prediction service, and when a run has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core import events as ev
from heddle_dask.core.events import PredictionMade
from heddle_dask.core.ids import FIRST_RUN, RunId, TrajectoryId
from heddle_dask.core.run_description import RunDescription
from heddle_dask.core.run_record import qualified
from heddle_dask.core.run_strategies import BuildStrategies
from heddle_dask.core.state import State
from heddle_dask.core.view import StrategySet
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.service import PredictionService
from heddle_dask.sim.fleet import ControlDelays
from heddle_dask.sim.loop import VirtualTime
from heddle_dask.sim.program import Program
from heddle_dask.strategies.presets import build_strategies, tell_costs
from heddle_dask.workloads.planned import PlannedTrajectory


class SimulatedPredictions:
    """Runs the calls and fits of a session's `PredictionService`.

    A call ends ``predict_s`` after its first request and answers all requests made until then. A fit begins after a
    call; its model is in use after ``ControlDelays.fitting_s``.
    """

    def __init__(
        self,
        predictor: Predictor | None,
        time: VirtualTime,
        delays: ControlDelays,
        state: State,
        answer: Callable[[PredictionMade], None],
    ) -> None:
        self._service = None if predictor is None else PredictionService(predictor)
        self._time = time
        self._delays = delays
        self._state = state
        self._answer = answer
        self._running = False

    def ask(self, trajectory_id: TrajectoryId) -> None:
        if self._service is None:
            raise AssertionError("these strategies ask for predictions: give the simulation a predictor")
        self._service.ask(self._state.trajectories[trajectory_id], self._time.now_s)
        if not self._running:
            self._start(self._service)

    def ended(self, trajectory_id: TrajectoryId, status: str) -> None:
        trajectory = self._state.trajectories.get(trajectory_id)
        if self._service is None or trajectory is None:
            return
        self._service.ended(trajectory, status, self._time.now_s)
        if not self._running:
            self._call(self._service)

    def _start(self, service: PredictionService) -> None:
        self._running = True
        self._time.after(self._delays.predict_s, self._answer_all, service)

    def _answer_all(self, service: PredictionService) -> None:
        self._call(service)
        self._running = False
        if service.asked:
            self._start(service)

    def _call(self, service: PredictionService) -> None:
        batch = service.take_batch()
        for event in service.answers(batch, service.call(batch), self._time.now_s):
            self._answer(event)
        if service.begin_fit():
            fitted = service.fit()
            fitting_s = 0.0 if fitted is None else self._delays.fitting_s(fitted.rows)
            self._time.after(fitting_s, service.end_fit, fitted)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A run that joins the first one in its world.

    Attributes
    ----------
    weight
        Its share of the cluster, relative to that of the other runs.
    predictor
        Required if its strategies have a predictor.
    starts_s
        When it joins, in seconds of the world.
    """

    strategy: str
    trajectories: Sequence[PlannedTrajectory]
    weight: float = 1.0
    overrides: tuple[str, ...] = ()
    seed: int = 0
    predictor: Predictor | None = None
    starts_s: float = 0.0

    def description(self, run_id: RunId) -> RunDescription:
        return RunDescription(run_id, f"run {run_id}", self.weight, self.strategy, self.overrides, self.seed)


def numbered(others: Sequence[SimulatedRun]) -> dict[RunId, SimulatedRun]:
    return {RunId(str(number)): run for number, run in enumerate(others, start=2)}


def programs_of(others: Mapping[RunId, SimulatedRun]) -> dict[str, Program]:
    """The programs of the runs that join, by the names under which the controller knows them."""
    programs = [
        Program(
            replace(
                plan,
                trajectory_id=qualified(run_id, plan.trajectory_id),
                group_id=qualified(run_id, plan.group_id),
            ),
            run_id,
        )
        for run_id, run in others.items()
        for plan in run.trajectories
    ]
    return {program.plan.trajectory_id: program for program in programs}


def strategies_builder(beliefs: Mapping[int, EngineCost]) -> BuildStrategies:
    """Builds the strategies of a run that joins; they plan with these costs by TP degree."""

    def build(run: RunDescription) -> StrategySet:
        strategies = build_strategies(run.strategy, seed=run.seed, overrides=run.overrides)
        tell_costs(strategies, beliefs)
        return strategies

    return build


class SimulatedRuns:
    """Lets runs join and leave."""

    def __init__(
        self,
        first: RunDescription,
        others: Mapping[RunId, SimulatedRun],
        programs: Iterable[Program],
        time: VirtualTime,
        tell: Callable[[ev.Event], None],
    ) -> None:
        self._first = first
        self._others = others
        self._programs: dict[RunId, list[Program]] = {}
        for program in programs:
            self._programs.setdefault(program.run_id, []).append(program)
        self._open = Counter({run_id: len(mine) for run_id, mine in self._programs.items()})
        self._time = time
        self._tell = tell

    def start(self) -> None:
        """Describe the first run, and have the others join at their times; nothing for a run that is alone."""
        if not self._others:
            return
        self._tell(ev.RunStarted(self._time.now_s, self._first))
        for run_id, run in self._others.items():
            self._time.at(run.starts_s, self._join, run_id)

    def _join(self, run_id: RunId) -> None:
        now_s = self._time.now_s
        self._tell(ev.RunStarted(now_s, self._others[run_id].description(run_id)))
        for program in self._programs[run_id]:
            self._tell(ev.TrajectorySubmitted(now_s, program.spec))

    def program_ended(self, program: Program) -> None:
        """A program has ended; with its last one, its run leaves, unless it is the last run."""
        self._open[program.run_id] -= 1
        if self._open[program.run_id] == 0 and any(self._open.values()):
            self._time.after(0.0, self._leave, program.run_id)

    def _leave(self, run_id: RunId) -> None:
        self._tell(ev.RunEnded(self._time.now_s, run_id))

    @property
    def of_first(self) -> list[Program]:
        return self._programs.get(FIRST_RUN, [])
