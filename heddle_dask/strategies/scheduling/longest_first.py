"""The trajectory with the most remaining work first (Heddle, section 4.2: progressive priority)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import Priority, Quantile, StepRequest
from heddle_dask.core.view import ClusterView
from heddle_dask.cost.engine_cost import EngineCost
from heddle_dask.strategies.engine_costs import EngineCosts


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
        """Use these costs by TP degree in place of the profile."""
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
        return Priority(0, tokens + tools_s / self._costs.pace_s if tools_s > 0 else tokens)
