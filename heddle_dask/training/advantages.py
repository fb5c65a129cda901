"""How much better than the other members of its group a trajectory is.

`AdvantageFunction` is the user's seam: ``package.module:function``. Here are the group-relative ones: the reward less
the mean of the group (GRPO without its division, as Dr. GRPO has it), optionally divided by the standard deviation
(GRPO, DeepSeekMath section 4.1).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from heddle_dask.core.errors import BadInput
from heddle_dask.training.groups import TrajectoryGroup

logger = logging.getLogger(__name__)

AdvantageFunction = Callable[[TrajectoryGroup], npt.NDArray[np.float64]]
"""One advantage for each member of a group, in their order; nan: unknown, and the member is not trained on."""

STD_FLOOR: Final = 1e-6
"""Added to the standard deviation, so that equal rewards give 0."""


def less_mean(group: TrajectoryGroup) -> npt.NDArray[np.float64]:
    """Reward less the mean over the members that were delivered, earlier ones included."""
    rewards, all_rewards = _rewards(group)
    return rewards - float(all_rewards.mean())


def less_mean_over_std(group: TrajectoryGroup) -> npt.NDArray[np.float64]:
    """`less_mean`, divided by the standard deviation (n - 1 in the denominator) of the same rewards."""
    _, all_rewards = _rewards(group)
    spread = float(all_rewards.std(ddof=1)) if len(all_rewards) > 1 else 0.0
    return less_mean(group) / (spread + STD_FLOOR)


ADVANTAGES: Final[dict[str, AdvantageFunction]] = {"mean": less_mean, "mean-std": less_mean_over_std}


def advantage_function(name: str) -> AdvantageFunction:
    """The function of this name, or that of the user by ``package.module:function``.

    Raises
    ------
    BadInput
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    hint = f"use {', '.join(ADVANTAGES)} or package.module:function"
    return _checked(name, user_function("advantages", name, hint))


def _checked(name: str, function: Callable[[TrajectoryGroup], Any]) -> AdvantageFunction:
    def checked(group: TrajectoryGroup) -> npt.NDArray[np.float64]:
        values = np.asarray(function(group), np.float64)
        if values.shape != (len(group.members),):
            raise BadInput(
                f"advantages {name!r}: {values.shape} values for a group of {len(group.members)}: give one number for "
                "each member"
            )
        for member, value in zip(group.members, values, strict=True):
            if not np.isfinite(value):
                logger.warning("advantages %r: %s of %s: it is not trained on", name, value, member.trajectory_id)
        return np.where(np.isfinite(values), values, np.nan)

    return checked


def _rewards(group: TrajectoryGroup) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Of the members that are trained here, and of all that were delivered."""
    rewards = np.array([member.reward for member in group.members], np.float64)
    return rewards, np.concatenate([np.array(group.earlier_rewards, np.float64), rewards])


def user_function(where: str, name: str, hint: str) -> Callable[..., Any]:
    """Import the function that a text names.

    Parameters
    ----------
    where, hint
        Of the message: which option it is, and what to use.

    Raises
    ------
    BadInput
        The text has another form, or the function cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise BadInput(f"{where} {name!r}: no such function: {hint}")
    try:
        function: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"{where} {name!r}: {error}: {hint}") from None
    if not callable(function):
        raise BadInput(f"{where} {name!r} is no function: {hint}")
    return function  # type: ignore[no-any-return]
