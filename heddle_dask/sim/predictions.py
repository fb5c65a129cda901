"""The predictor in virtual time: those that ask while a call runs share the next one, as live."""

from __future__ import annotations

from collections.abc import Callable

from heddle_dask.core.events import PredictionMade
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.state import State
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.features import Progress
from heddle_dask.predictors.from_state import finished_of, progress_of
from heddle_dask.sim.loop import VirtualTime


class SimulatedPredictions:
    """Answers and learns; one call takes `predict_s`, fitting takes no virtual time: it runs beside."""

    def __init__(
        self,
        predictor: Predictor | None,
        time: VirtualTime,
        predict_s: float,
        state: State,
        answer: Callable[[PredictionMade], None],
    ) -> None:
        self._predictor = predictor
        self._time = time
        self._predict_s = predict_s
        self._state = state
        self._answer = answer
        self._waiting: dict[TrajectoryId, Progress] = {}
        self._running = False

    def ask(self, trajectory_id: TrajectoryId) -> None:
        """Predict as of now."""
        if self._predictor is None:
            raise AssertionError("these strategies ask for predictions: give the simulation a predictor")
        trajectory = self._state.trajectories[trajectory_id]
        self._waiting[trajectory_id] = progress_of(trajectory, self._time.now_s)
        if not self._running:
            self._start()

    def ended(self, trajectory_id: TrajectoryId, status: str) -> None:
        """Learn from a trajectory that ends now."""
        trajectory = self._state.trajectories.get(trajectory_id)
        if self._predictor is not None and trajectory is not None:
            self._waiting.pop(trajectory_id, None)
            self._predictor.observe_finished(finished_of(trajectory, status, self._time.now_s))

    def _start(self) -> None:
        self._running = True
        self._time.after(self._predict_s, self._call)

    def _call(self) -> None:
        assert self._predictor is not None
        rows, self._waiting = list(self._waiting.values()), {}
        self._predictor.fit_if_due()
        for row in rows:
            self._predictor.observe_running(row)
        for row, made in zip(rows, self._predictor.predict(rows), strict=True):
            self._answer(
                PredictionMade(self._time.now_s, TrajectoryId(row.trajectory_id), row.steps_finished, made)
            )
        self._running = False
        if self._waiting:
            self._start()
