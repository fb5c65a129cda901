"""The controller's record of a run, and the names that keep runs apart."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from heddle_dask.core.credits import CreditLedger
from heddle_dask.core.ids import FIRST_RUN, EngineId, RunId, TrajectoryId
from heddle_dask.core.run_description import RunDescription

_QUALIFIED = re.compile(r"(.*)@([0-9]+)", re.DOTALL)


def qualified(run_id: RunId, name: str) -> str:
    """A name of a run as the controller knows it: two runs may use the same ids.

    Names of the first run are left as they are, unless they look like those of another run.
    """
    if run_id == FIRST_RUN and _QUALIFIED.fullmatch(name) is None:
        return name
    return f"{name}@{run_id}"


def plain_name(name: str) -> tuple[RunId, str]:
    """The inverse of `qualified`: the run, and the name that it uses itself."""
    found = _QUALIFIED.fullmatch(name)
    if found is None:
        return FIRST_RUN, name
    return RunId(found[2]), found[1]


@dataclass(slots=True, eq=False)
class RunRecord:
    """One run.

    Attributes
    ----------
    unadmitted
        Its submitted trajectories that wait for admission, oldest first.
    freed
        Engines with less load since the last call of its admission.
    alive, expected_tokens
        Its admitted trajectories that have not ended, and the sum of their `Trajectory.expected_tokens`.
    reservations
        Number of its trajectories with a reservation on an engine.
    kv_tokens
        Context tokens of its trajectories on engines, and the tokens reserved for them.
    sampled_tokens, observed_tokens
        Tokens that its trajectories have generated, and that tools and templates have added between steps.
    observed_per_token
        Observation tokens per generated token, from its predictor; None when unknown.
    held
        Number of its steps that are placed and held back.
    ledger
        Its credits, where it has a bound on staleness.
    without_credit
        Its submitted trajectories that wait for a credit, oldest first; they are not among `unadmitted`.
    cancelled
        Number of its cancelled trajectories by cause.
    """

    description: RunDescription
    unadmitted: dict[TrajectoryId, None] = field(default_factory=dict)
    freed: dict[EngineId, None] = field(default_factory=dict)
    alive: int = 0
    expected_tokens: int = 0
    reservations: int = 0
    kv_tokens: float = 0.0
    sampled_tokens: int = 0
    observed_tokens: int = 0
    observed_per_token: float | None = None
    held: int = 0
    ledger: CreditLedger | None = None
    without_credit: dict[TrajectoryId, None] = field(default_factory=dict)
    cancelled: dict[str, int] = field(default_factory=dict)
