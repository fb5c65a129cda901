"""The part of a history about training: optimiser steps, versions of the engines, pauses, and the loop's figures."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Final

from heddle_dask.core import events as ev
from heddle_dask.core.ids import PolicyVersion
from heddle_dask.views.history.bounded import FailureTally
from heddle_dask.views.history.run_snapshot import TrainingPoint, TrainingView

MOST_POINTS: Final = 500
"""Training steps whose figures are kept: the latest ones."""


class TrainingHistory:
    """Training steps and weight updates.

    Attributes
    ----------
    versions
        The version that each engine samples with, as far as an event has told it.
    """

    def __init__(self, failures: FailureTally) -> None:
        self._failures = failures
        self.versions: dict[str, PolicyVersion] = {}
        self._version: PolicyVersion | None = None
        self._published: PolicyVersion | None = None
        self._points: deque[TrainingPoint] = deque(maxlen=MOST_POINTS)
        self._updates = 0
        self._paused_s = self._longest_pause_s = 0.0

    def joined(self, event: ev.EngineJoined) -> None:
        self.versions[event.engine.engine_id] = PolicyVersion(event.engine.lineage, event.engine.policy_version)

    def lost(self, event: ev.EngineLost) -> None:
        self.versions.pop(event.engine_id, None)

    def step_ended(self, event: ev.OptimizerStepEnded) -> None:
        self._version = event.version

    def published(self, event: ev.WeightsPublished) -> None:
        self._published = event.version

    def fetched(self, event: ev.WeightsFetched) -> None:
        if event.cause:
            self._failures.count("weights", event.cause, event.at)

    def installed(self, event: ev.WeightsInstalled) -> None:
        if event.cause:
            self._failures.count("weights", event.cause, event.at)
        elif event.engine_id in self.versions:
            self.versions[event.engine_id] = event.version
            self._updates += 1
            self._paused_s += event.paused_s
            self._longest_pause_s = max(self._longest_pause_s, event.paused_s)

    def add_point(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of one training step, by name; a step that is told again replaces what was told before."""
        if self._points and self._points[-1].step >= step:
            kept = [point for point in self._points if point.step < step]
            self._points = deque(kept, MOST_POINTS)
        self._points.append(TrainingPoint(step, dict(figures)))

    def view(self) -> TrainingView | None:
        if self._version is None and not self._points:
            return None
        version = self._version or PolicyVersion()
        engines = Counter(str(each) for each in self.versions.values())
        return TrainingView(
            lineage=version.lineage,
            optimizer_steps=version.number,
            published="" if self._published is None else str(self._published),
            engines_by_version=dict(sorted(engines.items())),
            updates=self._updates,
            paused_mean_s=self._paused_s / self._updates if self._updates else 0.0,
            paused_max_s=self._longest_pause_s,
            points=tuple(self._points),
        )
