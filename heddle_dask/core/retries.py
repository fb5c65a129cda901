"""Retry limits of steps and actions, in the controller and in the program's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from heddle_dask.core.errors import BadInput

_LEAST = {"max_losses": 0, "max_preemptions": 0, "max_step_attempts": 1, "max_action_attempts": 1}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retry limits of every step and action; strategies cannot change them.

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

    Raises
    ------
    BadInput
        A value is no whole number, or too small.
    """

    max_losses: int = 3
    max_preemptions: int = 2
    max_step_attempts: int = 32
    max_action_attempts: int = 4

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
