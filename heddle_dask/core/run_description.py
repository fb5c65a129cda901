"""What a run says of itself when it joins a controller: enough to build its strategies again in a replay.

The bound on the age of trajectories is RollArt's (section 6.2), and the credits that keep it are AReaL's. n is the
number of finished optimiser steps, b the version that sampled the first token of a trajectory. A trajectory is valid
while n - b <= alpha. The delay between an optimiser step and the installation of its weights counts: b grows only when
engines sample with the newer weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.ids import FIRST_RUN, RunId

_LEAST = {
    "max_losses": 0,
    "max_preemptions": 0,
    "max_step_attempts": 1,
    "max_action_attempts": 1,
    "max_call_attempts": 1,
    "max_call_s": 1,
    "max_pool_wait_s": 0,
    "max_environment_attempts": 1,
    "environment_backoff_s": 0,
    "max_task_failures": 1,
}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retry limits of every step, action and environment; strategies cannot change them.

    Attributes
    ----------
    max_losses
        Number of deaths of its engine or worker, while it runs, after which one step or action is retried; at the next
        death the controller gives it up. This bounds the damage of a request that kills its engine. At least 0.
    max_preemptions
        Maximum number of preemptions of one step. At least 0.
    max_step_attempts
        Maximum number of requests of one step whose engine, result or context was lost, including the first. At least
        1.
    max_action_attempts
        Maximum number of requests of one action whose result was lost with its worker, including the first. At least 1.
    max_call_attempts
        Maximum number of calls of one action that an API refuses or fails (`Retry`, `RateLimited`), with the first. At
        least 1.
    max_call_s
        Seconds since its request after which such an action is not repeated, and for which an action waits for an API
        whose circuit breaker is open or that asks to be left alone. At least 1.
    max_pool_wait_s
        Seconds that an action waits while no worker of its pool could run it; then the controller gives it up. 0: it
        waits without a bound.
    max_environment_attempts
        Maximum number of attempts of one trajectory whose environment failed, including the first. At least 1.
    environment_backoff_s
        Seconds before its second attempt; they double with each further one, up to 64 times. At least 0.
    max_task_failures
        Failures of its environment, without a success in between, after which a task is quarantined: it is not
        attempted again. At least 1.
    """

    max_losses: int = 3
    max_preemptions: int = 2
    max_step_attempts: int = 32
    max_action_attempts: int = 4
    max_call_attempts: int = 6
    max_call_s: int = 600
    max_pool_wait_s: int = 600
    max_environment_attempts: int = 3
    environment_backoff_s: int = 1
    max_task_failures: int = 6

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadInput(f"retries: {name} is {value!r}: use a whole number of at least {least}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RetryPolicy:
        """The policy with these values by name; missing values have their defaults."""
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise BadInput(f"retries: unknown '{name}': use {', '.join(known)}")
        return replace(cls(), **values)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> RetryPolicy:
        """Parse ``key=value[,key=value]`` of the command line; dashes in keys count as underscores."""
        values: dict[str, int] = {}
        for part in (part for text in texts for part in text.split(",")):
            name, equals, value = part.partition("=")
            if not equals or not value.strip().isdecimal():
                raise BadInput(f"--retries {part!r}: use KEY=NUMBER, such as max_losses=3")
            values[name.strip().replace("-", "_")] = int(value)
        return cls.from_mapping(values)


StalenessMode = Literal["cancel", "pace"]

STALE: Final = "stale"
"""Cause of a cancellation: the trajectory would exceed the bound."""

REDUNDANT: Final = "redundant"
"""Cause of a cancellation: enough other members of its group, or other groups, have finished."""

TURN_REWARDS: Final = "turn_rewards"
"""The entry of a trajectory's metadata that has the rewards of its LLM steps, in their order."""


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

    def next_place(self, accepted: int, running: int) -> int:
        """The batch, from 0, in which the next group has its place; of what runs a part is redundant."""
        most = self.batch_trajectories + self.redundant_trajectories
        return (accepted * most + running * self.batch_trajectories) // (self.batch_trajectories * most)

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
    """Refuse a weight that is no finite number above 0."""
    if not is_finite(value) or not value > 0:
        raise BadInput(f"{name} is {value!r}: use a finite number above 0")
