"""How training and rollout overlap: what a user chooses, and the presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from heddle_dask.core.errors import BadInput

Mode = Literal["sync", "one-off", "async"]
"""Presets of a `TrainingPlan`; see `plan_of_mode`."""

SwitchOrder = Literal["after-batch", "before-batch"]

ASYNC_ALPHA: Final = 2
"""The bound of mode ``"async"`` where none is given: RollArt's bound of 1, counted by the versions of the engines.

Measured by ``python -m benchmarks rollart --experiment bound-2``; see ``benchmarks/training_simulated.md``.
"""

_MODES: Final = get_args(Mode)
_ORDERS: Final = get_args(SwitchOrder)


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What the training loop does and in which order. Pipeline depth and staleness are separate numbers.

    Attributes
    ----------
    steps
        Training steps of the whole run; each takes one batch.
    alpha
        The largest age of a sample that is trained, as in `core.run_description`.
    depth
        Batches that may be rolled out ahead of the batch that is being trained; 0: rollout and training take turns.
    barrier
        Rollout of a batch begins when that of the batch before has ended and the engines have their weights, and
        weights are switched in between only: every trajectory is sampled with one version.
    switch
        ``"before-batch"``: switch as soon as weights are published. ``"after-batch"``: get batch, switch to the weights
        of the step before, train (RollArt, section 4.5).
    evaluate_every
        Training steps between two evaluations; 0: none. With it, the first and the last weights are evaluated too.

    Raises
    ------
    BadInput
    """

    steps: int
    alpha: int
    depth: int
    barrier: bool
    switch: SwitchOrder
    evaluate_every: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("alpha", 0), ("depth", 0), ("evaluate_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadInput(f"{name} is {value!r}: use a whole number of at least {least}")
        if self.switch not in _ORDERS:
            raise BadInput(f"switch is {self.switch!r}: use {' or '.join(_ORDERS)}")
        if self.depth > self.alpha:
            raise BadInput(
                f"depth {self.depth} with alpha {self.alpha}: a batch that is rolled out {self.depth} ahead would be "
                f"too old to be trained; use a depth of at most {self.alpha}, or a larger alpha"
            )
        if self.barrier and self.depth > 1:
            raise BadInput(f"depth {self.depth} with one batch after another: use a depth of 0 or 1")
        if self.depth == 0 and self.switch == "after-batch":
            raise BadInput("depth 0 with switch=after-batch: the next batch needs the new weights, use before-batch")
        if self.barrier and self.depth == 1 and self.switch == "before-batch":
            raise BadInput(
                "one-off with switch=before-batch: trajectories of the running batch would change their weights; "
                "use after-batch, or mode async"
            )

    def needed_version(self, batch: int) -> int:
        """The number of the oldest weights with which batch `batch` may begin, where batches have barriers."""
        return max(0, batch - 1 - self.depth)

    def evaluates(self, number: int) -> bool:
        """Whether the weights after `number` training steps are evaluated."""
        if not self.evaluate_every:
            return False
        return number in (0, self.steps) or number % self.evaluate_every == 0


def plan_of_mode(
    mode: str,
    steps: int,
    *,
    alpha: int | None = None,
    depth: int | None = None,
    switch: SwitchOrder | None = None,
    evaluate_every: int = 0,
) -> TrainingPlan:
    """The plan of a preset, with parts of it replaced.

    Parameters
    ----------
    mode
        ``"sync"``: rollout, train, publish, install, next; alpha 0. ``"one-off"``: train on a batch while the next one
        is rolled out; all trajectories of it finish on the weights with which they began; alpha 1. ``"async"``:
        rollout never waits for a batch to end; alpha 1 or more [default: 2], depth alpha and switch before-batch unless
        given.

    Raises
    ------
    BadInput
        An unknown preset, or a value that contradicts it.
    """
    if mode == "sync":
        fixed: tuple[int, int, bool, SwitchOrder] = (0, 0, True, "before-batch")
    elif mode == "one-off":
        fixed = (1, 1, True, "after-batch")
    elif mode == "async":
        age = ASYNC_ALPHA if alpha is None else alpha
        if age == 0:
            raise BadInput("alpha 0 in mode async: use mode sync, or an alpha of at least 1")
        ahead = age if depth is None else depth
        return TrainingPlan(steps, age, ahead, False, switch or "before-batch", evaluate_every)
    else:
        raise BadInput(f"mode is {mode!r}: use {', '.join(_MODES)}")
    given = (alpha, depth, None, switch)
    for name, value, of_mode in zip(("alpha", "depth", "", "switch"), given, fixed, strict=True):
        if value is not None and value != of_mode:
            raise BadInput(f"{name} {value} in mode {mode}, whose {name} is {of_mode}: leave it out, or use mode async")
    return TrainingPlan(steps, fixed[0], fixed[1], fixed[2], fixed[3], evaluate_every)
