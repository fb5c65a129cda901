"""The options of one `call`, checked before anything is sent."""

from __future__ import annotations

import inspect
import math
from typing import get_args

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.core.needs import Given, Needs
from heddle_dask.environments.base import ActionKind


def check_call(
    function: object, cpus: Given | None, needs: object, kind: object, label: object, timeout_s: object
) -> Needs:
    """Refuse what no action can have; returns its needs.

    Raises
    ------
    BadInput
    """
    if not callable(function):
        raise BadInput(f"call: {function!r} is no function")
    if kind not in get_args(ActionKind):
        raise BadInput(f"call: kind is {kind!r}: use {' or '.join(get_args(ActionKind))}")
    if label is not None and not isinstance(label, str):
        raise BadInput(f"call: label is {label!r}: use a text")
    if timeout_s is not None and timeout_s != math.inf and not (is_finite(timeout_s) and timeout_s > 0):
        raise BadInput(f"call: timeout_s is {timeout_s!r}: use seconds above 0, math.inf, or None")
    if needs is not None:
        if not isinstance(needs, Needs):
            raise BadInput(f"call: needs is {needs!r}: use Needs(…)")
        if cpus is not None:
            raise BadInput("call: cpus and needs are both given: use Needs(cpus=…)")
        if needs.service and not inspect.iscoroutinefunction(function):
            raise BadInput(
                "call: only an async function can use a model service: use async def f(…, service)"
            )
        return needs
    return Needs(cpus=cpus)
