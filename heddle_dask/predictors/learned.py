"""The predictor that learns: falls back by how much it knows, refits as it learns more, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from heddle_dask.core.prediction import Prediction
from heddle_dask.predictors.contract import Fitted
from heddle_dask.predictors.features import NAN, Finished, Progress
from heddle_dask.predictors.groups import GroupBook
from heddle_dask.predictors.model import Model, fit_model
from heddle_dask.predictors.trees import TreeSettings

# What is said before anything is known; the order is the same for all.
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
        Finished trajectories kept; the oldest go first.
    """

    first_fit: int = 3
    growth: float = 0.25
    kept: int = 6000


class LearnedPredictor:
    """XGBoost over group history over the prompt over a constant; see `contract.Predictor`.

    `observe_*` and `predict` may run in one thread and `fit` in another. Nothing depends on time, on the
    order of a set, or on chance beyond `trees.seed`.
    """

    def __init__(self, trees: TreeSettings | None = None, learning: LearningSettings | None = None) -> None:
        self.trees = trees or TreeSettings()
        self.learning = learning or LearningSettings()
        self.model: Model | None = None
        self._book = GroupBook()
        self._finished: dict[str, Finished] = {}
        self._running: dict[str, list[Progress]] = {}
        # Of those that are kept.
        self._generated_tokens = 0
        self._observed_tokens = 0
        self._tools_s = 0.0
        self._told = 0
        self._fitted_at = 0
        self._lock = threading.Lock()

    def predict(self, rows: Sequence[Progress]) -> list[Prediction]:
        """One prediction per row from the last model; what is told of siblings since counts at once."""
        model = self.model
        if model is None:
            return [Prediction(UNKNOWN_TOKENS, UNKNOWN_TOKENS_Q90, "constant") for _ in rows]
        locate, locate_s = model.core.locate, model.core.locate_s
        with self._lock:
            facts = [self._book.facts(row, locate, locate_s) for row in rows]
            tokens = max(1, self._generated_tokens)
            observed_per_token, tools_s_per_token = self._observed_tokens / tokens, self._tools_s / tokens
            typical_tokens = tokens / max(1, len(self._finished))
        return [
            replace(
                one,
                tools_s=_tools_left_s(row, one.tokens, tools_s_per_token, typical_tokens),
                observation_per_token=observed_per_token,
            )
            for row, one in zip(rows, model.predict(rows, facts), strict=True)
        ]

    def observe_running(self, progress: Progress) -> None:
        """A trajectory has reached a decision point."""
        with self._lock:
            self._book.run(progress)
            points = self._running.setdefault(progress.trajectory_id, [])
            known = bool(points) and points[-1].steps_finished == progress.steps_finished
            if known or len(points) == POINTS_KEPT:
                points[-1] = progress  # after the same step, what is known now counts
            else:
                points.append(progress)

    def observe_finished(self, finished: Finished) -> None:
        """A trajectory has ended; without `points`, those told before are taken."""
        with self._lock:
            points = self._running.pop(finished.trajectory_id, [])
            self._learn(finished if finished.points else replace(finished, points=tuple(points)))

    def warm_start(self, finished: Iterable[Finished]) -> None:
        """Learn from earlier trajectories, oldest first, and fit."""
        with self._lock:
            for one in finished:
                self._learn(one)
        self._fit_and_adopt()

    def _learn(self, one: Finished) -> None:
        kept = tuple(one.points[:POINTS_KEPT])
        one = replace(one, points=kept)
        self._book.finish(one)
        self._forget(one.trajectory_id)
        self._finished[one.trajectory_id] = one
        self._generated_tokens += one.generated_tokens
        self._observed_tokens += one.observed_tokens
        self._tools_s += one.tools_s
        while len(self._finished) > self.learning.kept:
            self._forget(next(iter(self._finished)))
        self._told += 1

    def _forget(self, trajectory_id: str) -> None:
        known = self._finished.pop(trajectory_id, None)
        if known is not None:
            self._generated_tokens -= known.generated_tokens
            self._observed_tokens -= known.observed_tokens
            self._tools_s -= known.tools_s

    def due(self) -> bool:
        """Whether enough has been learnt since the last fit."""
        if self._fitted_at == 0:
            return self._told >= self.learning.first_fit
        return self._told >= (1.0 + self.learning.growth) * self._fitted_at

    def fit_if_due(self) -> bool:
        """Refit if due. Slow (seconds); `predict` goes on with the old model meanwhile."""
        return self.due() and self._fit_and_adopt()

    def _fit_and_adopt(self) -> bool:
        fitted = self.fit()
        if fitted is not None:
            self.adopt(fitted)
        return fitted is not None

    def fit(self) -> Fitted | None:
        """A model of all that was learnt, running trajectories as censored ones; None if no trajectory is complete."""
        with self._lock:
            told = self._told
            data = [*self._finished.values(), *(_so_far(points) for points in self._running.values())]
        model = fit_model(data, self.trees)
        rows = min(sum(len(one.points) for one in data), self.trees.max_rows)
        return None if model is None else Fitted(model, rows, told)

    def adopt(self, fitted: Fitted) -> None:
        """Answer with this model from now on."""
        self.model, self._fitted_at = fitted.model, fitted.told

    def learnt(self) -> tuple[list[Finished], int, int]:
        """What a copy needs: the kept trajectories, how many were told, and how many at the last fit."""
        with self._lock:
            return list(self._finished.values()), self._told, self._fitted_at

    def restore(self, finished: Iterable[Finished], told: int, fitted_at: int, model: Model | None) -> None:
        """Become what `learnt` and `model` of another predictor say."""
        with self._lock:
            for one in finished:
                self._learn(one)
            self._told, self._fitted_at, self.model = told, fitted_at, model


def _so_far(points: Sequence[Progress]) -> Finished:
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
    )


def _tools_left_s(
    row: Progress, left_tokens: float, tools_s_per_token: float, typical_tokens: float
) -> float:
    """As its tools have gone so far, for each token; those of all count like a typical trajectory's."""
    weight = max(1.0, typical_tokens)
    tools_s = row.tools_s + tools_s_per_token * weight
    return left_tokens * tools_s / (row.generated_tokens + weight)
