"""How often a step or an action is tried again, in the controller and in the program's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from heddle_dask.core.errors import BadInput

_LEAST = {"max_losses": 0, "max_preemptions": 0, "max_step_attempts": 1, "max_action_attempts": 1}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of every step and action, which no strategy may lift.

    Attributes
    ----------
    max_losses
        How often one step or action may die with its worker before the controller gives it up. A request that kills
        its engine must not kill every engine in turn. Times, at least 0.
    max_preemptions
        How often one step may be stopped for others. Times, at least 0.
    max_step_attempts
        How often the context asks for one step whose engine, result or context was lost, the first time included. At
        least 1.
    max_action_attempts
        How often the context asks for one action whose result died with its worker, the first time included. At least
        1.

    Raises
    ------
    BadInput
        A value that is no whole number, or too small.
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
        """The policy of these values by name; one that is missing has its default.

        Raises
        ------
        BadInput
            A name that is not known, or a value that is not allowed.
        """
        known = [each.name for each in fields(cls)]
        for name in values:
            if name not in known:
                raise BadInput(f"retries: unknown '{name}': use {', '.join(known)}")
        return replace(cls(), **values)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> RetryPolicy:
        """From ``key=value[,key=value]`` of the command line; dashes in keys count as underscores.

        Raises
        ------
        BadInput
            As `from_mapping`, and a part that is no ``key=value``.
        """
        values: dict[str, int] = {}
        for part in (part for text in texts for part in text.split(",")):
            name, equals, value = part.partition("=")
            if not equals or not value.strip().isdecimal():
                raise BadInput(f"--retries {part!r}: use KEY=NUMBER, such as max_losses=3")
            values[name.strip().replace("-", "_")] = int(value)
        return cls.from_mapping(values)
