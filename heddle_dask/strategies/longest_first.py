"""Order: the trajectory with the most work ahead runs first (Heddle, section 4.2: progressive priority)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heddle_dask.core.entities import Trajectory
from heddle_dask.core.nouns import StepRequest
from heddle_dask.core.view import ClusterView


def predicted_tokens(trajectory: Trajectory, quantile: Literal["median", "q90"]) -> float:
    """Tokens that the trajectory has still to generate; before any prediction, 0."""
    value = trajectory.predicted_tokens_q90 if quantile == "q90" else trajectory.predicted_tokens
    return 0.0 if value is None else value


@dataclass(frozen=True, slots=True)
class LongestFirst:
    """The longest predicted first, looked at anew at every step.

    Parameters
    ----------
    of
        ``"remaining"`` as the paper prints it, or ``"total"``: what was generated counts too. Like trajectories do not
        take turns at every step then, and keep their KV cache.
    quantile
        ``"q90"`` or ``"median"`` of the prediction. Not to miss a long one matters more than to be right on average.
    """

    of: Literal["remaining", "total"] = "total"
    quantile: Literal["median", "q90"] = "q90"

    def __post_init__(self) -> None:
        if self.of not in ("remaining", "total") or self.quantile not in ("median", "q90"):
            raise ValueError(f"of={self.of}, quantile={self.quantile}: use remaining or total, median or q90")

    def priority(self, view: ClusterView, trajectory: Trajectory, step: StepRequest, order: int) -> float:
        """Predicted tokens; without a prediction all are equal, and the order of arrival decides.

        The total is that of the latest prediction: neither a late one nor a step that was stopped makes it longer.
        """
        ahead = predicted_tokens(trajectory, self.quantile)
        return ahead + trajectory.predicted_at_tokens if self.of == "total" else ahead
