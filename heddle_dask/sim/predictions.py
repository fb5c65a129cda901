"""The prediction service in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from heddle_dask.core.events import PredictionMade
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.state import State
from heddle_dask.predictors.contract import Predictor
from heddle_dask.predictors.service import PredictionService
from heddle_dask.sim.fleet import ControlDelays
from heddle_dask.sim.loop import VirtualTime


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
        """Request a prediction as of now."""
        if self._service is None:
            raise AssertionError("these strategies ask for predictions: give the simulation a predictor")
        self._service.ask(self._state.trajectories[trajectory_id], self._time.now_s)
        if not self._running:
            self._start(self._service)

    def ended(self, trajectory_id: TrajectoryId, status: str) -> None:
        """Learn from a trajectory that ends now."""
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
