"""Retry limits of steps and actions, in the controller and in the program's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from heddle_dask.core.errors import BadInput

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

    Raises
    ------
    BadInput
        A value is no whole number, or too small.
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
        """The policy with these values by name; missing values have their defaults.

        Raises
        ------
        BadInput
            A name is unknown, or a value is not allowed.
        """
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise BadInput(f"retries: unknown '{name}': use {', '.join(known)}")
        return replace(cls(), **values)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> RetryPolicy:
        """Parse ``key=value[,key=value]`` of the command line; dashes in keys count as underscores.

        Raises
        ------
        BadInput
            See `from_mapping`; or a part is not of the form ``key=value``.
        """
        values: dict[str, int] = {}
        for part in (part for text in texts for part in text.split(",")):
            name, equals, value = part.partition("=")
            if not equals or not value.strip().isdecimal():
                raise BadInput(f"--retries {part!r}: use KEY=NUMBER, such as max_losses=3")
            values[name.strip().replace("-", "_")] = int(value)
        return cls.from_mapping(values)
