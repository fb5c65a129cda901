"""What a run says of itself when it joins a controller: enough to build its strategies again in a replay.

The bound on the age of trajectories is RollArt's (section 6.2), and the credits that keep it are AReaL's. n is the
number of finished optimiser steps, b the version that sampled the first token of a trajectory. A trajectory is valid
while n - b <= alpha. The delay between an optimiser step and the installation of its weights counts: b grows only when
engines sample with the newer weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.ids import FIRST_RUN, RunId
from heddle_dask.core.retries import RetryPolicy

StalenessMode = Literal["cancel", "pace"]

STALE: Final = "stale"
"""Cause of a cancellation: the trajectory would exceed the bound."""

REDUNDANT: Final = "redundant"
"""Cause of a cancellation: enough other members of its group, or other groups, have finished."""


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """How old a trajectory may be when it is trained on.

    Attributes
    ----------
    alpha
        The largest allowed n - b.
    mode
        ``"cancel"``: what exceeds the bound is cancelled at once, with its group, and its task is requested again.
        ``"pace"``: admission keeps the bound by credits, and nothing is cancelled.
    batch_trajectories
        Trajectories that one optimiser step takes (B).
    redundant_trajectories
        Trajectories beyond the credits that may run at a time: the driver cancels as many when the first have finished.

    Raises
    ------
    BadInput
    """

    alpha: int = 1
    mode: StalenessMode = "cancel"
    batch_trajectories: int = 1
    redundant_trajectories: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int) or self.alpha < 0:
            raise BadInput(f"alpha is {self.alpha!r}: use a whole number of at least 0")
        if self.mode not in ("cancel", "pace"):
            raise BadInput(f"staleness is {self.mode!r}: use cancel or pace")
        if self.batch_trajectories < 1:
            raise BadInput(f"a batch of {self.batch_trajectories} trajectories: use at least 1")
        if self.redundant_trajectories < 0:
            raise BadInput(f"{self.redundant_trajectories} redundant trajectories: use at least 0")

    def is_valid(self, optimizer_steps: int, first_version: int) -> bool:
        """Whether a trajectory that began under `first_version` may be trained on in step `optimizer_steps` + 1."""
        return optimizer_steps - first_version <= self.alpha

    def credits(self, optimizer_steps: int, accepted: int, running: int) -> int:
        """How many more trajectories may start: (alpha + n + 1) B - accepted - running, and the redundant ones.

        Parameters
        ----------
        optimizer_steps
            Since the training began or was resumed; `accepted` counts from there too.
        accepted
            Trajectories that went into batches or wait in the buffer.
        running
            Trajectories that are admitted, or whose group has begun, and that are neither accepted nor dropped.
        """
        most = (self.alpha + optimizer_steps + 1) * self.batch_trajectories + self.redundant_trajectories
        return most - accepted - running


UpdateOrder = Literal["one-by-one", "all-at-once"]
InstallTime = Literal["on-switch", "when-fetched"]


@dataclass(frozen=True, slots=True)
class WeightUpdatePolicy:
    """When and in which order engines install fetched weights.

    Attributes
    ----------
    order
        ``"one-by-one"``: one engine installs at a time, and the others generate; ``"all-at-once"``: each installs as
        soon as it may.
    keep_kv
        Steps in flight and cached prefixes keep the KV computed under older weights; else it is recomputed.
    install
        ``"on-switch"``: when the training loop asks for it (`SwitchRequested`); ``"when-fetched"``: at once.
    max_fetches
        Failed fetches and installations of one version by one engine before it is left at its weights until a newer one
        is published.
    retry_s
        Seconds before the first repetition of a failed fetch; doubled for each further one, up to a minute.

    Raises
    ------
    BadInput
    """

    order: UpdateOrder = "one-by-one"
    keep_kv: bool = False
    install: InstallTime = "on-switch"
    max_fetches: int = 5
    retry_s: float = 1.0

    def __post_init__(self) -> None:
        if self.order not in ("one-by-one", "all-at-once"):
            raise BadInput(f"order of weight updates is {self.order!r}: use one-by-one or all-at-once")
        if self.install not in ("on-switch", "when-fetched"):
            raise BadInput(f"install of weights is {self.install!r}: use on-switch or when-fetched")
        if isinstance(self.max_fetches, bool) or self.max_fetches < 1:
            raise BadInput(f"max_fetches of weights is {self.max_fetches!r}: use at least 1")
        if not is_finite(self.retry_s) or self.retry_s < 0:
            raise BadInput(f"retry_s of weights is {self.retry_s!r}: use a finite number of at least 0")

    def backoff_s(self, failures: int) -> float:
        """Seconds between the failure of that number (from 1) and the next fetch."""
        return float(min(60.0, self.retry_s * 2 ** (failures - 1)))


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
