"""The runs that share a cluster, as views show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heddle_dask.core.ids import FIRST_RUN
from heddle_dask.views.history.reward_history import RewardView


def title_of(name: str, environment: str) -> str:
    """``name (environment)``; the name alone where it says the same."""
    return f"{name} ({environment})" if environment not in ("", name) else name


@dataclass(frozen=True, slots=True)
class RunShare:
    """One of the open sessions, which share the cluster.

    Attributes
    ----------
    weight
        Its share of engines and pools, relative to that of the others.
    run_id, name, environment
        What its trajectories' ids end with, the name of its output or environment, and its environments.
    submitted, ended, rewards
        As those of the whole picture.
    live, not_admitted
        Its trajectories that are admitted and have not ended, and those that wait for admission.
    held
        Its steps that wait for their turn at an engine.
    """

    session: str
    strategy: str
    weight: float
    live: int
    not_admitted: int
    held: int
    generated_tokens: int
    run_id: str = FIRST_RUN
    name: str = ""
    environment: str = ""
    submitted: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)
    rewards: RewardView = field(default_factory=RewardView)

    @property
    def title(self) -> str:
        """Name and environment, for people; the id of the session where there is no name."""
        return title_of(self.name or self.session, self.environment)
