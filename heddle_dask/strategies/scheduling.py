"""Scheduling: the order of the steps of one engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import Priority, Quantile, StepRequest
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """Run steps in the order in which they were placed."""

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """Each placement has its own level; earlier ones are higher."""
        return Priority(-order)


@dataclass(frozen=True, slots=True)
class LeastAttained:
    """Multi-level queues by the tokens that a trajectory has generated, parts of a preempted step included.

    The queue of a step is chosen when it is placed, as Autellix counts the finished calls of a program. Autellix also
    lifts programs that have waited long for little service to the first queue; this does not.

    Parameters
    ----------
    quantum_tokens
        Service of the first level; each further level is twice as wide. Within a level: first come, first served.
    """

    quantum_tokens: int = 512

    def __post_init__(self) -> None:
        if self.quantum_tokens < 1:
            raise ValueError(f"quantum_tokens={self.quantum_tokens}: use a number of at least 1")

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """Minus the number of the queue, from 0 for the least service."""
        return Priority(-math.floor(math.log2(1 + trajectory.generated_tokens / self.quantum_tokens)))


def tokens_from_step_start(trajectory: Trajectory, quantile: Quantile) -> float:
    """Remaining tokens at the step from which the latest prediction counts; 0 when unknown.

    At least the tokens generated since. A preemption of the current step does not change it.
    """
    remaining = trajectory.remaining_tokens(quantile)
    return 0.0 if remaining is None else remaining + trajectory.tokens_since_prediction


@dataclass(slots=True)
class LongestFirst:
    """The longest predicted first, by the latest prediction at every step.

    Parameters
    ----------
    of
        ``"remaining"`` as in the paper, or ``"total"``, which includes generated tokens: trajectories of similar
        length then do not take turns at every step, and keep their KV cache.
    quantile
        ``"q90"`` or ``"median"`` of the prediction. An underestimated long trajectory costs more than a larger mean
        error.
    tools
        Whether tool seconds count too, converted to the tokens that a busy engine samples for one trajectory
        meanwhile: then the longest trajectory is the one that ends last, not the one that generates most.
    profile
        Cost profile of the engines (`heddle_dask.cost`), for `tools`.
    """

    of: Literal["remaining", "total"] = "total"
    quantile: Quantile = "q90"
    tools: bool = True
    profile: str = "tiny-cpu"
    _costs: EngineCosts = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.of not in ("remaining", "total") or self.quantile not in ("median", "q90"):
            raise ValueError(f"of={self.of}, quantile={self.quantile}: use remaining or total, median or q90")
        self._costs = EngineCosts(self.profile)

    def use_costs(self, known: Mapping[int, EngineCost]) -> None:
        self._costs = EngineCosts(self.profile, known)

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """Predicted tokens; without predictions all are equal, and the order of placements decides.

        By the latest prediction: neither a late prediction nor a preempted step makes the total longer, as long as no
        more is generated than was predicted.
        """
        said = trajectory.prediction
        if said is None:
            return Priority()
        tools_s = said.tools_s if self.tools else 0.0
        tokens = tokens_from_step_start(trajectory, self.quantile)
        if self.of == "total":
            tokens += trajectory.predicted_at_tokens
            tools_s += trajectory.predicted_at_tools_s if self.tools else 0.0
        if tools_s > 0:
            self._costs.see(view.ready_engines)
            tokens += tools_s / self._costs.pace_s
        return Priority(0, tokens)


@dataclass(frozen=True, slots=True)
class GroupFirst:
    """By the number of unfinished members of the group; ties: longest predicted first.

    The next group completes earlier, and the last one later: unsuitable for synchronous training.
    """

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> Priority:
        """A level per number of missing members; within it the longest predicted first."""
        lacking = view.unfinished_by_group.get(trajectory.spec.group_id, 1)
        return Priority(-lacking, tokens_from_step_start(trajectory, "q90"))
