"""Which argument of `Rollout` was meant, where a setting was given in another place."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

PLACES = {
    "Budget": "budget=Budget(…)",
    "RetryPolicy": "budget=Budget(retries=RetryPolicy(…))",
    "Sampling": "sampling=Sampling(…)",
    "Engines": "engines=Engines(…)",
    "EngineSpec": "engines=EngineSpec(…)",
    "VllmOptions": "engines=Engines(options=VllmOptions(…))",
    "Patience": "engines=Engines(patience=Patience(…))",
    "Strategy": "strategy=Strategy(…)",
    "Pools": "pools=Pools(…)",
    "ServiceSpec": "pools=Pools(services=[ServiceSpec(…)])",
    "ApiQuota": "pools=Pools(quotas=[ApiQuota(…)])",
    "ChatModel": "model=ChatModel(…)",
    "Output": "out=Output(…)",
    "Telemetry": "out=Output(PATH, telemetry=Telemetry(…))",
}
"""Where the settings go that `Rollout` takes, by the name of their class."""


def meant(value: object) -> str:
    """The end of a refusal: where a setting of this type goes; empty for anything else."""
    place = PLACES.get(type(value).__name__)
    return f"; this one goes to {place}" if place else ""


def shown(value: object) -> str:
    """A wrong value in a message: settings are long."""
    return f"{type(value).__name__}(…)" if is_dataclass(value) and not isinstance(value, type) else repr(value)


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose unknown arguments are refused with the setting that has a field of that name."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"Rollout has no argument {name!r}{_place_of(name, list(known)[1:])}")
        return function(*args, **kwargs)

    return called


def _place_of(name: str, known: Sequence[str]) -> str:
    for kind in _settings():
        if name in (each.name for each in fields(kind)):
            return f": use {PLACES[kind.__name__].replace('…', f'{name}=…')}"
    near = difflib.get_close_matches(name, known, 1)
    return f": did you mean {near[0]!r}?" if near else f": use {', '.join(known)}"


def _settings() -> tuple[Any, ...]:
    from heddle_dask.core.run_description import RetryPolicy
    from heddle_dask.live.driver.inputs.pools import Pools
    from heddle_dask.live.driver.inputs.rollout_inputs import ChatModel, Output
    from heddle_dask.live.driver.options import Budget, Engines, Patience, Sampling
    from heddle_dask.strategies.presets import Strategy

    return Budget, Sampling, Engines, Patience, Pools, Strategy, Output, ChatModel, RetryPolicy
