"""Presets: named bundles of strategies, and how a part of one is replaced.

A strategy's dataclass fields are its options: there is no other schema.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from heddle_dask.core.errors import BadInput
from heddle_dask.core.view import StrategySet
from heddle_dask.strategies.admission import AtMost, Unlimited
from heddle_dask.strategies.first_come import FirstComeFirstServed, FirstComeMinimum
from heddle_dask.strategies.least_load import LeastLoad
from heddle_dask.strategies.round_robin import RoundRobin
from heddle_dask.strategies.sticky import Sticky
from heddle_dask.strategies.sticky_least_loaded import StickyLeastLoaded

PARTS: Mapping[str, Mapping[str, type]] = {
    "placement": {
        "round-robin": RoundRobin,
        "least-load": LeastLoad,
        "sticky": Sticky,
        "sticky-least-loaded": StickyLeastLoaded,
    },
    "scheduling": {"fcfs": FirstComeFirstServed},
    "admission": {"unlimited": Unlimited, "at-most": AtMost},
    "actions": {"fcfs-minimum": FirstComeMinimum},
}

_FIRST_COME = {"scheduling": "fcfs", "admission": "unlimited", "actions": "fcfs-minimum"}
PRESETS: Mapping[str, Mapping[str, str]] = {
    name: {"placement": name, **_FIRST_COME}
    for name in ("round-robin", "least-load", "sticky", "sticky-least-loaded")
}


def build_strategies(preset: str, *, seed: int = 0, overrides: Sequence[str] = ()) -> StrategySet:
    """Build the strategies of a preset.

    Parameters
    ----------
    seed
        For every strategy that draws (random ties).
    overrides
        ``part=name[,option=value]…``, for example ``admission=at-most,alive=64``.

    Raises
    ------
    BadInput
        Unknown preset, part, name or option; the message lists what is allowed.
    """
    if preset not in PRESETS:
        raise BadInput(f"unknown strategy '{preset}'; choose one of: {', '.join(PRESETS)}")
    chosen: dict[str, tuple[str, dict[str, Any]]] = {
        part: (name, {}) for part, name in PRESETS[preset].items()
    }
    for text in overrides:
        part, name, options = _parse_override(text)
        chosen[part] = (name, options)
    return StrategySet(
        **{part: _build(part, name, options, seed) for part, (name, options) in chosen.items()}
    )


def _parse_override(text: str) -> tuple[str, str, dict[str, Any]]:
    head, *rest = text.split(",")
    part, _, name = head.partition("=")
    if part not in PARTS:
        raise BadInput(f"--set {text}: unknown part '{part}'; choose one of: {', '.join(PARTS)}")
    if name not in PARTS[part]:
        raise BadInput(f"--set {text}: unknown {part} '{name}'; choose one of: {', '.join(PARTS[part])}")
    options: dict[str, Any] = {}
    for pair in rest:
        key, equals, value = pair.partition("=")
        if not equals:
            raise BadInput(f"--set {text}: '{pair}' is not of the form option=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return part, name, options


def _build(part: str, name: str, options: dict[str, Any], seed: int) -> Any:
    kind = PARTS[part][name]
    allowed = {f.name: f for f in fields(kind) if f.init and not f.name.startswith("_")}
    for key in options:
        if key not in allowed:
            listed = ", ".join(allowed) or "none"
            raise BadInput(f"{part} '{name}' has no option '{key}'; its options: {listed}")
    for key, option in allowed.items():
        if key not in options and option.default is MISSING and option.default_factory is MISSING:
            raise BadInput(f"{part} '{name}' needs the option '{key}': {part}={name},{key}=…")
    if "seed" in allowed:
        options = {"seed": seed, **options}
        if not isinstance(options["seed"], int):  # None would seed from the system: no replay
            raise BadInput(f"{part} '{name}': seed is {options['seed']!r}; it must be a whole number")
    try:
        strategy = kind(**options)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{part} '{name}': {error}") from error
    return strategy
