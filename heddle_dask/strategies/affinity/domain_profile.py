"""What the steps of each task domain have been like so far: running means, from answers alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.events import StepFinished

_LEAST_STEPS = 8
"""A domain is known from so many answered steps on; below, it is taken to be like all domains together."""


@dataclass(slots=True)
class StepMeans:
    """Means over the answered steps of a domain, and over its ended trajectories.

    Attributes
    ----------
    steps, trajectories, trajectory_steps
        Counted steps, ended trajectories, and steps of these.
    context_tokens, generated_tokens, prompt_tokens
        Mean context at the end of a step; mean tokens that it generated; mean prompt tokens that the engine computed
        for it, so without those in its prefix cache.
    """

    steps: int = 0
    trajectories: int = 0
    trajectory_steps: int = 0
    context_tokens: float = 0.0
    generated_tokens: float = 0.0
    prompt_tokens: float = 0.0

    def add(self, context_tokens: int, generated_tokens: int, prompt_tokens: int) -> None:
        """Count a step."""
        self.steps += 1
        self.context_tokens += (context_tokens - self.context_tokens) / self.steps
        self.generated_tokens += (generated_tokens - self.generated_tokens) / self.steps
        self.prompt_tokens += (prompt_tokens - self.prompt_tokens) / self.steps

    def end(self, steps: int) -> None:
        """Count an ended trajectory."""
        self.trajectories += 1
        self.trajectory_steps += steps

    def expected_steps(self, done: int) -> float:
        """Expected number of steps after `done` ones, at least 1; as memoryless lengths have it."""
        ended = self.trajectory_steps / self.trajectories if self.trajectories else 2.0 * done + 1.0
        return max(1.0, ended - done, 0.5 * ended)


@dataclass(slots=True)
class DomainProfiles:
    """The means of every domain, and of all of them together."""

    _of: dict[str, StepMeans] = field(default_factory=dict)
    _all: StepMeans = field(default_factory=StepMeans)

    def step_ended(self, trajectory: Trajectory, answer: StepFinished) -> None:
        """Count the latest finished step of a trajectory, with its last answer."""
        generated = trajectory.step_tokens[-1]
        prompt = max(0, trajectory.context_tokens - answer.new_tokens - answer.cached_tokens)
        for means in (self._of.setdefault(trajectory.spec.domain, StepMeans()), self._all):
            means.add(trajectory.context_tokens, generated, prompt)

    def trajectory_ended(self, trajectory: Trajectory) -> None:
        """Count the steps of an ended trajectory, if it has any."""
        if trajectory.steps_finished:
            for means in (self._of.setdefault(trajectory.spec.domain, StepMeans()), self._all):
                means.end(trajectory.steps_finished)

    def of(self, domain: str) -> StepMeans | None:
        """The means of a domain; of all while it is new; None before any step has ended."""
        means = self._of.get(domain)
        if means is not None and means.steps >= _LEAST_STEPS:
            return means
        return self._all if self._all.steps else None

    def is_known(self, domain: str) -> bool:
        """Whether the domain has means of its own."""
        means = self._of.get(domain)
        return means is not None and means.steps >= _LEAST_STEPS
