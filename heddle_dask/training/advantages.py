"""How much better than the other members of its group a trajectory is, or each of its turns.

`AdvantageFunction` is the user's seam: ``package.module:function``. Here are the group-relative ones: the reward less
the mean of the group (GRPO without its division, as Dr. GRPO has it), optionally divided by the standard deviation
(GRPO, DeepSeekMath section 4.1).

Where an environment gives rewards to turns, the tokens of a turn are credited with the return from that turn on: its
reward and those that follow, without a discount. It is compared with what the other members got from the same turn on;
one that had ended before stands there with its last turn. So the baseline of a turn does not depend on what the turn
did (RLOO, arXiv 2402.14740), values are made relative among steps at one place (GiGPO, arXiv 2505.10978; the number of
the turn is the place here), and rewards of last turns alone give the same as rewards of trajectories.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from heddle_dask.core.errors import BadInput
from heddle_dask.training.groups import TokenSequence, TrainingTrajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

Advantage = float | npt.NDArray[np.float64]
"""Of a member as a whole, or an array with that of each of its turns; nan: unknown, the member is not trained on."""

AdvantageFunction = Callable[[TrajectoryGroup], Sequence[Advantage] | npt.NDArray[np.float64]]
"""One advantage for each member of a group, in their order."""

STD_FLOOR: Final = 1e-6
"""Added to the standard deviation, so that equal rewards give 0."""


def less_mean(group: TrajectoryGroup) -> Sequence[Advantage] | npt.NDArray[np.float64]:
    """Reward less the mean over the members that were delivered, earlier ones included."""
    return _relative(group, lambda rewards, all_rewards: rewards - float(all_rewards.mean()))


def less_mean_over_std(group: TrajectoryGroup) -> Sequence[Advantage] | npt.NDArray[np.float64]:
    """`less_mean`, divided by the standard deviation (n - 1 in the denominator) of the same rewards."""
    return _relative(group, _over_std)


_Values = npt.NDArray[np.float64]


def _over_std(rewards: _Values, all_rewards: _Values) -> _Values:
    spread = float(all_rewards.std(ddof=1)) if len(all_rewards) > 1 else 0.0
    found: _Values = (rewards - float(all_rewards.mean())) / (spread + STD_FLOOR)
    return found


def _relative(
    group: TrajectoryGroup, compared: Callable[[_Values, _Values], _Values]
) -> Sequence[Advantage] | npt.NDArray[np.float64]:
    """Compare the rewards of members with all rewards of their group; those of turns with those at the same turn.

    Of members that were delivered earlier only the whole reward is known, so late ones are compared as wholes.
    """
    members, earlier = group.members, np.array(group.earlier_rewards, np.float64)
    if len(earlier) or not any(member.turn_rewards for member in members):
        rewards = np.array([member.reward for member in members], np.float64)
        return compared(rewards, np.concatenate([earlier, rewards]))
    returns = [
        _returns(member.turn_rewards) if member.turn_rewards else np.array([member.reward]) for member in members
    ]
    found = [np.empty(len(each)) for each in returns]
    for turn in range(max(map(len, returns))):
        here = np.array([each[min(turn, len(each) - 1)] for each in returns])
        for mine, value in zip(found, compared(here, here), strict=True):
            if turn < len(mine):
                mine[turn] = value
    return found


def _returns(rewards: Sequence[float]) -> _Values:
    """From each turn on: its reward and those that follow."""
    found: _Values = np.cumsum(np.array(rewards, np.float64)[::-1])[::-1]
    return found


def is_known(advantage: Advantage) -> bool:
    return bool(np.isfinite(advantage).all())


def token_advantages(advantage: Advantage, sequence: TokenSequence) -> npt.NDArray[np.float64]:
    """The advantage at each trained token of a member's sequence, 0 elsewhere."""
    values = np.atleast_1d(np.asarray(advantage, np.float64))
    return np.where(sequence.trained, values[np.clip(sequence.turns, 0, len(values) - 1)], 0.0)


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
    def checked(group: TrajectoryGroup) -> Sequence[Advantage]:
        values = [np.asarray(value, np.float64) for value in function(group)]
        lengths = [{1, _turns(member)} for member in group.members]
        if len(values) != len(lengths) or any(
            value.ndim > 1 or value.size not in allowed for value, allowed in zip(values, lengths, strict=True)
        ):
            raise BadInput(
                f"advantages {name!r}: {len(values)} values for a group of {len(group.members)}: give one number for "
                "each member, or an array with one for each of its turns"
            )
        for member, value in zip(group.members, values, strict=True):
            if not is_known(value):
                logger.warning("advantages %r: %s of %s: it is not trained on", name, value, member.trajectory_id)
        return [value if is_known(value) else np.float64(np.nan) for value in values]

    return checked


def _turns(member: TrainingTrajectory) -> int:
    return 1 + max(int(sequence.turns.max(initial=0)) for sequence in member.sequences)


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
