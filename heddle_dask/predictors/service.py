"""Schedules the calls and fits of a session's predictor; used by the live and the simulated body.

The service converts the controller's records to the inputs of predictors, queues requests, batches them into calls,
decides when a fit runs, and turns predictions into events. It has no clock and no thread. The body runs `call` and
`fit`: live in two executor threads, simulated in virtual time. A fit takes seconds; the old model answers until
`end_fit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.events import PredictionMade
from heddle_dask.core.ids import TrajectoryId
from heddle_dask.core.nouns import Prediction
from heddle_dask.core.transitions import TrajectoryState
from heddle_dask.predictors.contract import Fitted, Predictor
from heddle_dask.predictors.features import NAN, RECENT, Finished, Progress


def progress_of(trajectory: Trajectory, at: float) -> Progress:
    """The current decision point of a trajectory; of a running tool only the label is known."""
    done, running = trajectory.actions_done, trajectory.open_labels[-RECENT:]
    labels = [label for label, _, _ in done[-RECENT:]] + running
    times_s = [seconds for _, seconds, _ in done[-RECENT:]] + [NAN] * len(running)
    return Progress(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.spec.group_id,
        domain=trajectory.spec.domain,
        policy_version=trajectory.policy_version,
        prompt_tokens=trajectory.spec.prompt_tokens or trajectory.first_context_tokens,
        message_tokens=trajectory.spec.message_tokens,
        context_tokens=trajectory.context_tokens,
        generated_tokens=trajectory.generated_tokens,
        steps_finished=trajectory.steps_finished,
        max_steps=trajectory.spec.max_steps,
        step_tokens=tuple(trajectory.step_tokens[-RECENT:]),
        observed_tokens=tuple(trajectory.observed_tokens[-RECENT:]),
        tool_labels=tuple(labels[-RECENT:]),
        tool_times_s=tuple(times_s[-RECENT:]),
        tools_s=trajectory.tools_s,
        tool_errors=sum(not ok for _, _, ok in done),
        last_tool_failed=bool(done) and not done[-1][2],
        elapsed_s=_elapsed_s(trajectory, at),
        at_s=at,
        prompt_key=trajectory.spec.prompt_key,
        lineage=_lineage(trajectory),
    )


def finished_of(trajectory: Trajectory, status: str, at: float) -> Finished:
    """A trajectory at its end; censored if it did not end by itself or began in an earlier session."""
    prompt_tokens = trajectory.spec.prompt_tokens or trajectory.first_context_tokens
    return Finished(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.spec.group_id,
        domain=trajectory.spec.domain,
        policy_version=trajectory.policy_version,
        prompt_tokens=prompt_tokens,
        message_tokens=trajectory.spec.message_tokens,
        max_steps=trajectory.spec.max_steps,
        generated_tokens=trajectory.generated_tokens,
        observed_tokens=max(0, trajectory.context_tokens - prompt_tokens - trajectory.generated_tokens),
        tools_s=trajectory.tools_s,
        duration_s=_elapsed_s(trajectory, at),
        censored=status != "completed" or trajectory.spec.resumed_tokens > 0,
        started_at_s=at - _elapsed_s(trajectory, at),
        ended_at_s=at,
        steps_finished=trajectory.steps_finished,
        prompt_key=trajectory.spec.prompt_key,
        lineage=_lineage(trajectory),
    )


def _lineage(trajectory: Trajectory) -> str:
    """The line of training of the version that samples it; empty before the first result."""
    return trajectory.kv_version.lineage if trajectory.kv_version is not None else ""


def _elapsed_s(trajectory: Trajectory, at: float) -> float:
    """Seconds since admission; 0 for a trajectory that still waits for it."""
    return 0.0 if trajectory.state is TrajectoryState.SUBMITTED else at - trajectory.admitted_at


@dataclass(frozen=True, slots=True)
class PredictionBatch:
    """One call of the predictor: it learns from `ended`, then answers each of `rows`."""

    ended: tuple[Finished, ...]
    rows: tuple[Progress, ...]


class PredictionService:
    """Prediction requests, observations and fits of one predictor.

    `call` and `fit` may each run in a thread of their own; all other methods belong to one thread.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._waiting: dict[TrajectoryId, Progress] = {}
        self._ended: list[Finished] = []
        self._fitting = False

    @property
    def asked(self) -> bool:
        return bool(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a prediction request, or a finished trajectory to learn from, waits for the next call."""
        return bool(self._waiting or self._ended)

    def ask(self, trajectory: Trajectory, at: float) -> None:
        """Request a prediction as of `at` seconds; replaces a waiting request of the same trajectory."""
        self._waiting[trajectory.trajectory_id] = progress_of(trajectory, at)

    def ended(self, trajectory: Trajectory, status: str, at: float) -> None:
        """Learn from a trajectory that ends at `at` seconds, and drop its waiting request.

        Answering the request would make the predictor count the trajectory as running for ever.
        """
        self._waiting.pop(trajectory.trajectory_id, None)
        self._ended.append(finished_of(trajectory, status, at))

    def take_batch(self) -> PredictionBatch:
        """Take everything that waits as the batch of the next call."""
        batch = PredictionBatch(tuple(self._ended), tuple(self._waiting.values()))
        self._ended, self._waiting = [], {}
        return batch

    def call(self, batch: PredictionBatch) -> list[Prediction]:
        """Run the predictor: one prediction per row of the batch. Takes milliseconds."""
        for one in batch.ended:
            self._predictor.observe_finished(one)
        for row in batch.rows:
            self._predictor.observe_running(row)
        return self._predictor.predict(batch.rows) if batch.rows else []

    @staticmethod
    def answers(batch: PredictionBatch, made: Sequence[Prediction], at: float) -> list[PredictionMade]:
        """The predictions of a call as events at `at` seconds, in the order of the rows."""
        return [
            PredictionMade(at, TrajectoryId(row.trajectory_id), row.steps_finished, one)
            for row, one in zip(batch.rows, made, strict=True)
        ]

    def begin_fit(self) -> bool:
        """Whether a fit is due and none is under way; if so, the body runs `fit` and then calls `end_fit`.

        Check it after each call, not after a fit: a fit that finds too little data stays due.
        """
        if self._fitting or not self._predictor.due():
            return False
        self._fitting = True
        return True

    def fit(self) -> Fitted | None:
        """Fit a new model, which is not in use yet; None without data. Takes seconds."""
        return self._predictor.fit()

    def end_fit(self, fitted: Fitted | None) -> None:
        """Answer with the new model from now on."""
        self._fitting = False
        if fitted is not None:
            self._predictor.adopt(fitted)
