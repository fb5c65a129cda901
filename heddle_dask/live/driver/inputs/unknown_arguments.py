"""Unknown arguments of `Rollout`: the message names the setting that has them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from heddle_dask.core.run_description import RetryPolicy
from heddle_dask.live.driver.inputs.meant_arguments import PLACES
from heddle_dask.live.driver.inputs.pools import Pools
from heddle_dask.live.driver.inputs.rollout_inputs import ChatModel, Output
from heddle_dask.live.driver.options import Budget, Engines, Patience, Sampling
from heddle_dask.strategies.presets import Strategy

P = ParamSpec("P")
R = TypeVar("R")

SETTINGS: tuple[Any, ...] = (Budget, Sampling, Engines, Patience, Pools, Strategy, Output, ChatModel, RetryPolicy)


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose unknown arguments are refused with the setting that has a field of that name."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if "on_progress" in kwargs:  # its former name
            kwargs.setdefault("progress", kwargs.pop("on_progress"))
        for name in kwargs:
            if name not in known:
                raise TypeError(f"Rollout has no argument {name!r}{_place_of(name, list(known)[1:])}")
        return function(*args, **kwargs)

    return called


def _place_of(name: str, known: Sequence[str]) -> str:
    for kind in SETTINGS:
        if name in (each.name for each in fields(kind)):
            return f": use {PLACES[kind.__name__].replace('…', f'{name}=…')}"
    near = difflib.get_close_matches(name, known, 1)
    return f": did you mean {near[0]!r}?" if near else f": use {', '.join(known)}"
