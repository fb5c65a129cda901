"""What a run says of itself when it joins a controller: enough to build its strategies again in a replay."""

from __future__ import annotations

from dataclasses import dataclass, field

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.ids import FIRST_RUN, RunId
from heddle_dask.core.retries import RetryPolicy
from heddle_dask.core.staleness import StalenessBound
from heddle_dask.core.weight_policy import WeightUpdatePolicy


@dataclass(frozen=True, slots=True)
class RunDescription:
    """One run among those that share a cluster.

    Attributes
    ----------
    name
        Name for people: the id of its session.
    weight
        Its share of the engines and pools, relative to that of the other runs that want them.
    strategy, overrides, seed
        As `strategies.presets.strategies_of_run` takes them.
    cost
        The same, as JSON text; empty: none was given.
    staleness
        The bound on the age of its trajectories; None: nothing is trained on them.
    weights
        How engines go over to the weights that it trains.
    """

    run_id: RunId = FIRST_RUN
    name: str = ""
    weight: float = 1.0
    strategy: str = "sticky-least-loaded"
    overrides: tuple[str, ...] = ()
    seed: int = 0
    cost: str = ""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    staleness: StalenessBound | None = None
    weights: WeightUpdatePolicy = field(default_factory=WeightUpdatePolicy)


def check_weight(name: str, value: object) -> None:
    """Refuse a weight that is no finite number above 0.

    Raises
    ------
    BadInput
    """
    if not is_finite(value) or not value > 0:
        raise BadInput(f"{name} is {value!r}: use a finite number above 0")
