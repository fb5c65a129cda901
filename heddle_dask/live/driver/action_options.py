"""The options of one `call`, checked before anything is sent."""

from __future__ import annotations

import math
from typing import get_args

from heddle_dask.core.errors import BadInput, is_finite
from heddle_dask.environments.base import ActionKind


def check_call(
    function: object, cpus: object, kind: object, label: object, timeout_s: object
) -> tuple[int, int]:
    """Refuse what no action can have; returns the least and the most CPUs.

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
    return _least_and_most(cpus)


def _least_and_most(cpus: object) -> tuple[int, int]:
    if isinstance(cpus, tuple | list) and len(cpus) == 2 and all(type(each) is int for each in cpus):
        least, most = cpus
        if 0 <= least <= most:
            return least, most
    raise BadInput(f"call: cpus is {cpus!r}: use (least, most) with 0 <= least <= most")
