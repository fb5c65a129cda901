"""The learned predictor: refits as trajectories end, uses simpler models while data are few, in bounded memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core.nouns import Prediction
from heddle_dask.predictors.contract import Fitted
from heddle_dask.predictors.features import NAN, Finished, GroupFacts, Progress
from heddle_dask.predictors.model import Model, fit_model
from heddle_dask.predictors.prompt_history import PastAttempt
from heddle_dask.predictors.samples import GroupBook
from heddle_dask.predictors.trees import TreeSettings

# Prediction before any data; equal for all trajectories, so that it orders none.
UNKNOWN_TOKENS = 1000.0
UNKNOWN_TOKENS_Q90 = 5000.0
POINTS_KEPT = 40


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """When to refit and how much to keep.

    Attributes
    ----------
    first_fit
        Finished trajectories before the first fit.
    growth
        A refit is due when the number of finished trajectories has grown by this share since the last one.
    kept
        Finished trajectories kept; the oldest are dropped first.
    """

    first_fit: int = 3
    growth: float = 0.25
    kept: int = 6000


@dataclass(frozen=True, slots=True)
class Learnt:
    """What a learned predictor knows, besides its model.

    Attributes
    ----------
    finished
        Kept trajectories, which later fits learn from.
    told, fitted_at
        Trajectories observed so far, and at the last fit.
    run
        Number of the run of the latest trajectory; -1: there is none.
    history
        Kept attempts by prompt.
    """

    finished: tuple[Finished, ...]
    told: int
    fitted_at: int
    run: int
    history: Mapping[str, Sequence[PastAttempt]]


class LearnedPredictor:
    """Uses the best model that the data allow: XGBoost, group history, the prompt, or a constant.

    Implements `contract.Predictor`. `observe_*` and `predict` may run in one thread and `fit` in another. Results do
    not depend on time, on the order of a set, or on randomness beyond `trees.seed`.
    """

    def __init__(self, trees: TreeSettings | None = None, learning: LearningSettings | None = None) -> None:
        self.trees = trees or TreeSettings()
        self.learning = learning or LearningSettings()
        self.model: Model | None = None
        self._book = GroupBook()
        self._finished: dict[str, Finished] = {}
        self._running: dict[str, list[Progress]] = {}
        # Sums over the kept trajectories.
        self._generated_tokens = 0
        self._observed_tokens = 0
        self._tools_s = 0.0
        self._told = 0
        self._fitted_at = 0
        self._lock = threading.Lock()

    def predict(self, rows: Sequence[Progress]) -> list[Prediction]:
        """One prediction per row from the last model; siblings observed since its fit count at once."""
        model = self.model
        if model is None:
            unknown = Prediction(UNKNOWN_TOKENS, UNKNOWN_TOKENS_Q90, "constant", learnt_from=0)
            return [unknown for _ in rows]
        expected = model.core.expected
        with self._lock:
            facts = [self._book.facts(row, expected) for row in rows]
            tokens = max(1, self._generated_tokens)
            observed_per_token, tools_s_per_token = self._observed_tokens / tokens, self._tools_s / tokens
            typical_tokens = tokens / max(1, len(self._finished))
        return [
            Prediction(
                median,
                q90,
                source,
                tools_s=_tools_left_s(row, told, median, tools_s_per_token, typical_tokens),
                observation_tokens=_observed_left(told, median, observed_per_token, model.ratio_trust),
                # Of all trajectories: the controller takes it as the ratio of the run, whoever was asked about.
                observation_per_token=observed_per_token,
                learnt_from=self._fitted_at,
            )
            for row, told, (median, q90, source) in zip(rows, facts, model.quantiles(rows, facts), strict=True)
        ]

    def observe_running(self, progress: Progress) -> None:
        with self._lock:
            self._book.running(progress)
            points = self._running.setdefault(progress.trajectory_id, [])
            known = bool(points) and points[-1].steps_finished == progress.steps_finished
            if known or len(points) == POINTS_KEPT:
                points[-1] = progress  # newer facts of the same step; or no further point is kept
            else:
                points.append(progress)

    def observe_finished(self, finished: Finished) -> None:
        with self._lock:
            points = self._running.pop(finished.trajectory_id, [])
            self._learn(finished if finished.points else replace(finished, points=tuple(points)))

    def warm_start(self, finished: Iterable[Finished]) -> None:
        """Learn from the trajectories of an earlier run, oldest first, and fit."""
        with self._lock:
            for one in finished:
                self._learn(one)
            self._book.run += 1
        self._fit_and_adopt()

    def _learn(self, one: Finished) -> None:
        kept = tuple(one.points[:POINTS_KEPT])
        one = replace(one, points=kept, run=self._book.run)
        self._book.finish(one)
        self._keep(one)
        self._told += 1

    def _keep(self, one: Finished) -> None:
        # Later runs use the names of trajectories again.
        name = f"{one.run}/{one.trajectory_id}"
        self._forget(name)
        self._finished[name] = one
        self._generated_tokens += one.generated_tokens
        self._observed_tokens += one.observed_tokens
        self._tools_s += one.tools_s
        while len(self._finished) > self.learning.kept:
            self._forget(next(iter(self._finished)))

    def _forget(self, name: str) -> None:
        known = self._finished.pop(name, None)
        if known is not None:
            self._generated_tokens -= known.generated_tokens
            self._observed_tokens -= known.observed_tokens
            self._tools_s -= known.tools_s

    def due(self) -> bool:
        if self._fitted_at == 0:
            return self._told >= self.learning.first_fit
        return self._told >= (1.0 + self.learning.growth) * self._fitted_at

    def _fit_and_adopt(self) -> bool:
        fitted = self.fit()
        if fitted is not None:
            self.adopt(fitted)
        return fitted is not None

    def fit(self) -> Fitted | None:
        """Fit on all observations, running trajectories as censored ones; None if no trajectory is complete."""
        with self._lock:
            told = self._told
            run = self._book.run
            data = [*self._finished.values(), *(_so_far(points, run) for points in self._running.values())]
        model = fit_model(data, self.trees)
        rows = min(sum(len(one.points) for one in data), self.trees.max_rows)
        return None if model is None else Fitted(model, rows, told)

    def adopt(self, fitted: Fitted) -> None:
        self.model, self._fitted_at = fitted.model, fitted.told

    def learnt(self) -> Learnt:
        with self._lock:
            history = {key: tuple(each) for key, each in self._book.history.attempts().items()}
            run = max((one.run for one in self._finished.values()), default=-1)
            return Learnt(tuple(self._finished.values()), self._told, self._fitted_at, run, history)

    def restore(self, learnt: Learnt, model: Model | None) -> None:
        """Take over the state of another predictor, as that of earlier runs."""
        with self._lock:
            for one in learnt.finished:
                self._keep(one)
            for key, attempts in learnt.history.items():
                for attempt in attempts:
                    self._book.history.add(key, attempt)
            self._book.run = learnt.run + 1
            self._told, self._fitted_at, self.model = learnt.told, learnt.fitted_at, model


def _so_far(points: Sequence[Progress], run: int) -> Finished:
    """A running trajectory as a censored one."""
    first, last = points[0], points[-1]
    return Finished(
        trajectory_id=last.trajectory_id,
        group_id=last.group_id,
        domain=last.domain,
        policy_version=last.policy_version,
        prompt_tokens=last.prompt_tokens,
        message_tokens=last.message_tokens,
        max_steps=last.max_steps,
        generated_tokens=last.generated_tokens,
        duration_s=last.elapsed_s,
        censored=True,
        started_at_s=first.at_s,
        ended_at_s=float("inf") if first.at_s == first.at_s else NAN,
        points=tuple(points),
        steps_finished=last.steps_finished,
        prompt_key=last.prompt_key,
        lineage=last.lineage,
        run=run,
    )


def _tools_left_s(row: Progress, told: GroupFacts, left_tokens: float, of_all: float, typical_tokens: float) -> float:
    """Predicted tool seconds: the trajectory's seconds per token so far, shrunk to those of its prompt."""
    weight = max(1.0, typical_tokens)
    of_prompt = (told.past_tools_s + of_all * weight) / (told.past_tokens + weight)
    tools_s = row.tools_s + of_prompt * weight
    return left_tokens * tools_s / (row.generated_tokens + weight)


def _observed_left(told: GroupFacts, left_tokens: float, of_all: float, trust: float) -> float | None:
    """Predicted observation tokens: those of the prompt's attempts per token, shrunk to all; None without attempts."""
    if not told.past_tokens or math.isinf(trust):
        return None
    weight = told.finished / (told.finished + trust)
    return left_tokens * (weight * told.past_observed_tokens / told.past_tokens + (1.0 - weight) * of_all)
